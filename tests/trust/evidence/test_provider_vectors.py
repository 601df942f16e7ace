"""A provider's evidence: a fixed vector, our code, and a computation from docs/protocol.md alone."""

from __future__ import annotations

import datetime
import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from convoy.trust.evidence.level import Level
from convoy.trust.evidence.provider import Challenged, Claimant, ProviderRules, appraise_provider
from convoy.wire.messages.claims import decode_claims

FILE = Path(__file__).parents[2] / "vectors" / "provider_evidence_v1.json"


@pytest.fixture(scope="module")
def vector() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def raw(vector: dict[str, Any], name: str) -> bytes:
    return bytes.fromhex(vector[name])


def test_our_code_believes_the_vector(vector: dict[str, Any]) -> None:
    identity = bytes.fromhex(vector["identities"]["alpha"])
    claimant = Claimant(identity, raw(vector, "request_key"), vector["request_key_expires_s"])
    challenged = Challenged(raw(vector, "coordinator"), raw(vector, "nonce"))
    found = appraise_provider(
        *(raw(vector, "evidence"), claimant, ProviderRules(), decode_claims(raw(vector, "claims"))),
        challenged=challenged,
        now=datetime.datetime.now(datetime.UTC),
    )
    assert [(one.member, one.level) for one in found.members] == [
        ("alpha", Level.SELF_SIGNED),
        ("beta", Level.SELF_SIGNED),
    ]


# From here on docs/protocol.md, sections 10 and 11; nothing of ours.


def lp(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def test_a_second_computation_agrees(vector: dict[str, Any]) -> None:
    keys = {
        name: Ed25519PrivateKey.from_private_bytes(bytes.fromhex(seed))
        for name, seed in vector["seeds"].items()
    }
    public = {name: key.public_key().public_bytes_raw() for name, key in keys.items()}
    coordinator, nonce = raw(vector, "coordinator"), raw(vector, "nonce")
    request_key, expiry = raw(vector, "request_key"), vector["request_key_expires_s"].to_bytes(8, "big")
    label = b"convoy provider evidence v1"
    binding = hashlib.sha256(lp(label, b"member of", public["alpha"])).digest()
    purpose = hashlib.sha256(lp(label, b"purpose", coordinator, nonce, request_key, expiry)).digest()
    assert (binding, purpose) == (raw(vector, "binding"), raw(vector, "purpose"))
    claims, members = raw(vector, "claims"), []
    for name, key in keys.items():
        signed = lp(b"convoy attestation v1", b"evidence", binding, purpose, public[name], claims, b"")
        signature = key.sign(signed)
        assert signature.hex() == vector["member_signatures"][name]
        members.append([name, public[name], claims, signature, "", []])
    said = msgspec.msgpack.encode(["ProviderEvidence", coordinator, nonce, list(range(8)), b"", members])
    signature = keys["alpha"].sign(lp(label, b"set", request_key, expiry, said))
    assert msgspec.msgpack.encode([said, signature]) == raw(vector, "evidence")
