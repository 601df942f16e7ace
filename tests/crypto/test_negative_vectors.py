"""Negative vectors: inputs that every implementation refuses, with the class of the error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from convoy import errors
from convoy.crypto.cipher import TAG_BYTES, Cipher
from convoy.crypto.handshake import Ephemeral, Initiator, Responder
from convoy.crypto.seal import Opener
from vectors.generate_handshake import BOTH, context, seed

VECTORS = Path(__file__).parents[1] / "vectors"
HONEST = json.loads((VECTORS / "handshake_v1.json").read_text(encoding="utf-8"))
CASES: list[dict[str, Any]] = json.loads((VECTORS / "negative_v1.json").read_text(encoding="utf-8"))["cases"]


def changed(data: bytes, case: dict[str, Any]) -> bytes:
    out = bytearray(data)
    for offset, text in case.get("edits", []):
        new = bytes.fromhex(text)
        out[offset : offset + len(new)] = new
    return bytes(out[: case.get("cut")]) + bytes.fromhex(case.get("add", ""))


def initiator() -> Initiator:
    ephemeral = Ephemeral(
        X25519PrivateKey.from_private_bytes(seed("initiator x25519")),
        MLKEM768PrivateKey.from_seed_bytes(seed("initiator mlkem", 64)),
    )
    return Initiator(context(), Ed25519PrivateKey.from_private_bytes(seed("alpha")).sign, BOTH, ephemeral)


def responder() -> Responder:
    return Responder(context(), Ed25519PrivateKey.from_private_bytes(seed("beta")).sign, BOTH)


def refuse_1(message: bytes) -> None:
    end = responder()
    end.consume_1(message)
    end.create_2()  # where shares are used


def refuse_2(message: bytes) -> None:
    end = initiator()
    end.create_1()
    end.consume_2(message)


def refuse_3(message: bytes) -> None:
    # M2 draws fresh randomness, so that the recorded M3 is of another handshake already; changed, no less.
    dialler, end = initiator(), responder()
    end.consume_1(dialler.create_1())
    dialler.consume_2(end.create_2())
    honest, _ = dialler.create_3()
    recorded = bytes.fromhex(HONEST["message_3"])
    same = bytes(b if a == c else c for a, b, c in zip(recorded, honest, message, strict=False))
    end.consume_3(same + message[len(same) :])


def refuse_frame(case: dict[str, Any]) -> None:
    frame = HONEST["frames_to_responder"][0]
    header, sealed = (bytearray.fromhex(frame[name]) for name in ("header", "sealed"))
    for offset, text in case.get("header_edits", []):
        header[offset : offset + 1] = bytes.fromhex(text)
    if "flip" in case:
        sealed[case["flip"]] ^= 1
    sealed = sealed[: case.get("cut")]
    secret = bytearray.fromhex(HONEST[case.get("direction", "to_responder")])
    opener = Opener(secret, Cipher.AES_256_GCM)
    out = memoryview(bytearray(len(sealed) - TAG_BYTES))
    if case.get("twice"):
        opener.open_into(0, header, sealed, out)
    opener.open_into(case.get("sequence", 0), header, sealed, out)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['message']}: {case['what']}")
def test_what_is_changed_is_refused_by_the_class_that_the_vector_names(case: dict[str, Any]) -> None:
    named = getattr(errors, case["error"])
    with pytest.raises(errors.PeerError) as caught:  # noqa: PT012 - one call for each kind of message
        if case["message"] == "frame":
            refuse_frame(case)
        else:
            refuse = {"message_1": refuse_1, "message_2": refuse_2, "message_3": refuse_3}[case["message"]]
            refuse(changed(bytes.fromhex(HONEST[case["message"]]), case))
    assert type(caught.value) is named


def test_the_honest_messages_are_not_refused() -> None:
    refuse_1(bytes.fromhex(HONEST["message_1"]))
    refuse_2(bytes.fromhex(HONEST["message_2"]))
    refuse_3(bytes.fromhex(HONEST["message_3"]))
    refuse_frame({})
