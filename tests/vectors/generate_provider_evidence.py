"""Writes provider_evidence_v1.json: what a provider of two members shows, from fixed keys.

Ed25519 draws nothing, so the same bytes come each time. `test_provider_vectors.py` computes them a second
time from docs/protocol.md. Provenance: `python tests/vectors/generate_provider_evidence.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from convoy.trust.evidence.evidence import Occasion, make_evidence, provider_binding, provider_purpose
from convoy.wire.fleet.provider_evidence import MemberEvidence, ProviderEvidence, sign_provider_evidence
from convoy.wire.messages.claims import Claims, encode_claims

SEEDS = {"alpha": bytes([1]) * 32, "beta": bytes([2]) * 32}
COORDINATOR, NONCE = bytes([3]) * 32, bytes([4]) * 32
REQUEST_KEY, EXPIRES_S = bytes(range(256)) * 4 + bytes(192), 1_800_000_000
CLAIMS = Claims("ab" * 32, {"convoy": "0.1.0", "torch": "2.13.0"}, "Linux test", "cd" * 32, [])


def make() -> dict[str, object]:
    """Make all values in hex, texts and numbers as they are."""
    keys = {name: Ed25519PrivateKey.from_private_bytes(seed) for name, seed in SEEDS.items()}
    public = {name: key.public_key().public_bytes_raw() for name, key in keys.items()}
    purpose = provider_purpose(COORDINATOR, NONCE, REQUEST_KEY, EXPIRES_S)
    binding = provider_binding(public["alpha"])
    members = []
    for name, key in keys.items():
        occasion = Occasion(binding, purpose, public[name])
        made = make_evidence(key.sign, occasion, encode_claims(CLAIMS))
        members.append(MemberEvidence(name, public[name], made.claims, made.signature, "", []))
    said = ProviderEvidence(COORDINATOR, NONCE, list(range(8)), b"", members)
    return {
        "provenance": "tests/vectors/generate_provider_evidence.py",
        "seeds": {name: seed.hex() for name, seed in SEEDS.items()},
        "identities": {name: key.hex() for name, key in public.items()},
        "coordinator": COORDINATOR.hex(),
        "nonce": NONCE.hex(),
        "request_key": REQUEST_KEY.hex(),
        "request_key_expires_s": EXPIRES_S,
        "binding": binding.hex(),
        "purpose": purpose.hex(),
        "claims": encode_claims(CLAIMS).hex(),
        "member_signatures": {one.name: one.signature.hex() for one in members},
        "evidence": sign_provider_evidence(said, REQUEST_KEY, EXPIRES_S, keys["alpha"].sign).hex(),
    }


if __name__ == "__main__":
    file = Path(__file__).with_name("provider_evidence_v1.json")
    file.write_text(json.dumps(make(), indent=1) + "\n")
