"""Fixed vectors, checked by our code and by a second key schedule written from docs/protocol.md alone."""

from __future__ import annotations

import hashlib
import hmac
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from convoy.crypto.handshake import Ephemeral, Initiator
from convoy.errors import HandshakeError
from vectors.generate_handshake import BOTH, context, seed

VECTOR = json.loads((Path(__file__).parents[1] / "vectors" / "handshake_v1.json").read_text(encoding="utf-8"))


def value(name: str) -> bytes:
    return bytes.fromhex(VECTOR[name])


def initiator() -> Initiator:
    ephemeral = Ephemeral(
        X25519PrivateKey.from_private_bytes(seed("initiator x25519")),
        MLKEM768PrivateKey.from_seed_bytes(seed("initiator mlkem", 64)),
    )
    sign = Ed25519PrivateKey.from_private_bytes(seed("alpha")).sign
    return Initiator(context(), sign, BOTH, ephemeral)


def test_our_initiator_says_and_derives_what_the_vector_says() -> None:
    end = initiator()
    assert end.create_1() == value("message_1")
    end.consume_2(value("message_2"))
    message_3, secrets = end.create_3()
    assert message_3 == value("message_3")
    assert secrets.send == value("to_responder")
    assert secrets.receive == value("to_initiator")
    assert secrets.transcript == value("transcript")
    assert secrets.binding == value("binding")


@pytest.mark.parametrize(
    ("offset", "named"),
    [
        (2, "not offered"),
        (3, "MAC of beta"),
        (43, "MAC of beta"),
        (75, "MAC of beta"),
        (1163, "signature"),
        (1227, "MAC of beta"),
    ],
)
def test_a_changed_second_message_fails_as_the_vector_says(offset: int, named: str) -> None:
    end = initiator()
    end.create_1()
    changed = bytearray(value("message_2"))
    changed[offset] ^= 0x40
    with pytest.raises(HandshakeError, match=named):
        end.consume_2(bytes(changed))


# From here on the page alone: HMAC and SHA-256, nothing of ours.


def lp(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def hmac256(key: bytes, data: bytes) -> bytes:
    return hmac.new(key, data, hashlib.sha256).digest()


LABEL = b"convoy link v1"


def expand(secret: bytes, *info: bytes) -> bytes:
    return hmac256(secret, lp(LABEL, *info) + b"\x01")  # RFC 5869, one block of 32 bytes


def test_an_independent_key_schedule_agrees() -> None:
    message_1, message_2, message_3 = (value(f"message_{n}") for n in (1, 2, 3))
    body, signature_r, mac_r = message_2[:1163], message_2[1163:1227], message_2[1227:]
    signature_i, mac_i = message_3[:64], message_3[64:]
    about = context()
    t1 = sha256(
        lp(
            LABEL,
            about.initiator.certificate_fingerprint,
            about.responder.certificate_fingerprint,
            message_1,
        )
    )
    t2 = sha256(lp(LABEL, t1, body))
    secret = hmac256(t2, value("x25519_shared") + value("mlkem_shared"))
    t3 = sha256(lp(LABEL, t2, signature_r, mac_r))
    t4 = sha256(lp(LABEL, t3, signature_i, mac_i))
    for role, transcript, party, signature, mac in (
        (b"responder", t2, about.responder, signature_r, mac_r),
        (b"initiator", t3, about.initiator, signature_i, mac_i),
    ):
        key = expand(secret, b"mac", role)
        assert hmac256(key, lp(LABEL, b"mac", role, transcript, party.identity_key)) == mac
        signed = lp(LABEL, b"signature", role, transcript)
        Ed25519PublicKey.from_public_bytes(party.identity_key).verify(signature, signed)
    assert t4 == value("transcript")
    assert expand(secret, b"binding", t4) == value("binding")
    assert expand(secret, b"traffic", b"initiator to responder", t4) == value("to_responder")
    assert expand(secret, b"traffic", b"responder to initiator", t4) == value("to_initiator")


def test_an_independent_opener_agrees_across_the_ratchet() -> None:
    secret, turn, left = value("to_responder"), 0, VECTOR["ratchet_after_records"]
    for sequence, frame in enumerate(VECTOR["frames_to_responder"]):
        nonce = turn.to_bytes(4, "big") + sequence.to_bytes(8, "big")
        opened = AESGCM(expand(secret, b"key")).decrypt(
            nonce, bytes.fromhex(frame["sealed"]), bytes.fromhex(frame["header"])
        )
        assert opened.hex() == frame["text"]
        left -= 1
        if left == 0:
            secret, turn, left = expand(secret, b"ratchet"), turn + 1, VECTOR["ratchet_after_records"]
