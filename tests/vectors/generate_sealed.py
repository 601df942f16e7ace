"""Writes sealed_v1.json: a request sealed to a fixed key, and its answer in three chunks.

HPKE draws a key of its own for each message, so the sealed body is recorded and not made again;
tests/crypto/test_sealed_vectors.py opens it with a second computation written from docs/protocol.md.
Provenance: this script, once; `python tests/vectors/generate_sealed.py` writes another recording.
"""

from __future__ import annotations

import json
from pathlib import Path

from convoy.crypto.sealed.answer import AnswerSealer
from convoy.crypto.sealed.request import RequestFacts, RequestKey, request_hash, seal_request

MLKEM_SEED, X25519 = bytes(range(64)), bytes(range(64, 96))
CHUNKS = [b'{"status":200,"content_type":"text/event-stream"}', b"data: [DONE]\n\n"]
LAST = b'{"prompt_tokens":14,"completion_tokens":2}'


def make() -> dict[str, object]:
    """Make all values in hex, texts as they are."""
    key = RequestKey(MLKEM_SEED, X25519)
    facts = RequestFacts(
        provider="one",
        key_id=key.key_id,
        model="adder",
        request_id="fleet-000102030405060708090a0b-1",
        lease=b"lease-000102030405060708090a0b0c0d0e0f",
        expires_s=1_800_000_000,
        max_tokens=64,
        kind="chat",
    )
    body = b'{"messages":[{"content":"What is 20+22?","role":"user"}],"model":"adder","max_tokens":64}'
    sealed, secret = seal_request(key.public, facts, body)
    digest = request_hash(facts, sealed)
    sealer = AnswerSealer(secret, digest)
    chunks = [sealer.seal(one) for one in CHUNKS] + [sealer.seal(LAST, last=True)]
    return {
        "provenance": "tests/vectors/generate_sealed.py",
        "mlkem_seed": MLKEM_SEED.hex(),
        "x25519": X25519.hex(),
        "public_key": key.public.hex(),
        "key_id": key.key_id.hex(),
        "provider": facts.provider,
        "model": facts.model,
        "request_id": facts.request_id,
        "lease": facts.lease.decode(),
        "expires_s": facts.expires_s,
        "max_tokens": facts.max_tokens,
        "kind": facts.kind,
        "info": facts.info().hex(),
        "body": body.decode(),
        "answer_secret": secret.hex(),
        "sealed": sealed.hex(),
        "request_hash": digest.hex(),
        "answer_nonce": sealer.nonce.hex(),
        "chunks": [one.decode() for one in [*CHUNKS, LAST]],
        "sealed_chunks": [one.hex() for one in chunks],
    }


if __name__ == "__main__":
    file = Path(__file__).with_name("sealed_v1.json")
    file.write_text(json.dumps(make(), indent=1) + "\n")
