"""Sealed requests and answers: fixed vectors, our code, and a computation from docs/protocol.md alone."""

from __future__ import annotations

import hashlib
import hmac
import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from convoy.crypto.sealed.answer import AnswerOpener
from convoy.crypto.sealed.request import RequestFacts, RequestKey, request_hash, sealed_size
from convoy.errors import SealError

FILE = Path(__file__).parents[1] / "vectors" / "sealed_v1.json"


@pytest.fixture(scope="module")
def vector() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def raw(vector: dict[str, Any], name: str) -> bytes:
    return bytes.fromhex(vector[name])


def key_of(vector: dict[str, Any]) -> RequestKey:
    return RequestKey(raw(vector, "mlkem_seed"), raw(vector, "x25519"))


def facts_of(vector: dict[str, Any]) -> RequestFacts:
    return RequestFacts(
        provider=vector["provider"],
        key_id=raw(vector, "key_id"),
        model=vector["model"],
        request_id=vector["request_id"],
        lease=vector["lease"].encode(),
        expires_s=vector["expires_s"],
        max_tokens=vector["max_tokens"],
        kind=vector["kind"],
    )


def test_our_code_opens_the_vector(vector: dict[str, Any]) -> None:
    key, facts, sealed = key_of(vector), facts_of(vector), raw(vector, "sealed")
    assert (key.public, key.key_id) == (raw(vector, "public_key"), raw(vector, "key_id"))
    assert facts.info() == raw(vector, "info")
    opened = key.open(facts, sealed)
    assert (opened.body.decode(), opened.answer_secret) == (vector["body"], raw(vector, "answer_secret"))
    assert len(sealed) == sealed_size(len(opened.body))
    assert request_hash(facts, sealed) == raw(vector, "request_hash")
    opener = AnswerOpener(opened.answer_secret, raw(vector, "request_hash"), raw(vector, "answer_nonce"))
    chunks = [bytes.fromhex(one) for one in vector["sealed_chunks"]]
    last = len(chunks) - 1
    said = [opener.open(one, last=index == last).decode() for index, one in enumerate(chunks)]
    assert said == vector["chunks"]


def test_any_changed_byte_of_the_vector_is_noticed(vector: dict[str, Any]) -> None:
    key, facts, sealed = key_of(vector), facts_of(vector), raw(vector, "sealed")
    for place in range(0, len(sealed), 97):
        changed = bytearray(sealed)
        changed[place] ^= 1
        with pytest.raises(SealError):
            key.open(facts, bytes(changed))


# From here on docs/protocol.md, section 11, and the RFCs it names; nothing of ours.


def lp(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def hkdf_expand(key: bytes, info: bytes, length: int) -> bytes:
    out, block = b"", b""
    while len(out) < length:
        block = hmac.digest(key, block + info + bytes([len(out) // 32 + 1]), "sha256")
        out += block
    return out[:length]


def unpadded(data: bytes) -> bytes:
    return data[4 : 4 + int.from_bytes(data[:4], "big")]


def test_a_second_computation_agrees(vector: dict[str, Any]) -> None:
    info = b"convoy sealed request v1\x01" + lp(
        vector["provider"].encode(),
        hashlib.sha256(raw(vector, "public_key")).digest()[:16],
        vector["model"].encode(),
        vector["request_id"].encode(),
        vector["lease"].encode(),
        vector["expires_s"].to_bytes(8, "big"),
        vector["max_tokens"].to_bytes(8, "big"),
        vector["kind"].encode(),
    )
    assert info == raw(vector, "info")
    sealed = raw(vector, "sealed")
    plain = unpadded(hpke_open(vector, info, sealed))
    assert (plain[:32], plain[32:].decode()) == (raw(vector, "answer_secret"), vector["body"])
    digest = hashlib.sha256(lp(info) + sealed).digest()
    assert digest == raw(vector, "request_hash")
    label = b"convoy sealed answer v1"
    extracted = hmac.digest(raw(vector, "answer_nonce"), plain[:32], "sha256")
    aead = AESGCM(hkdf_expand(extracted, label + digest, 32))
    said = []
    for index, one in enumerate(vector["sealed_chunks"]):
        is_last = index == len(vector["sealed_chunks"]) - 1
        nonce = index.to_bytes(11, "big") + bytes([is_last])
        said.append(unpadded(aead.decrypt(nonce, bytes.fromhex(one), label)).decode())
    assert said == vector["chunks"]


def hpke_open(vector: dict[str, Any], info: bytes, sealed: bytes) -> bytes:
    """Open by RFC 9180 in base mode: X-Wing (0x647a), HKDF-SHA256 (1), AES-256-GCM (2)."""
    suite = b"HPKE" + (0x647A).to_bytes(2, "big") + (1).to_bytes(2, "big") + (2).to_bytes(2, "big")

    def extract(salt: bytes, name: bytes, key: bytes) -> bytes:
        return hmac.digest(salt or bytes(32), b"HPKE-v1" + suite + name + key, "sha256")

    def expand(key: bytes, name: bytes, context: bytes, length: int) -> bytes:
        return hkdf_expand(key, length.to_bytes(2, "big") + b"HPKE-v1" + suite + name + context, length)

    context = b"\0" + extract(b"", b"psk_id_hash", b"") + extract(b"", b"info_hash", info)
    secret = extract(xwing(vector, sealed[:1120]), b"secret", b"")
    key, nonce = expand(secret, b"key", context, 32), expand(secret, b"base_nonce", context, 12)
    return AESGCM(key).decrypt(nonce, sealed[1120:], b"")


def xwing(vector: dict[str, Any], enc: bytes) -> bytes:
    """Combine as draft-connolly-cfrg-xwing-kem: SHA3-256 of secrets, X25519's ciphertext and key, a label."""
    lattice = MLKEM768PrivateKey.from_seed_bytes(raw(vector, "mlkem_seed"))
    curve = X25519PrivateKey.from_private_bytes(raw(vector, "x25519"))
    of_lattice = lattice.decapsulate(enc[:1088])
    of_curve = curve.exchange(X25519PublicKey.from_public_bytes(enc[1088:]))
    own = curve.public_key().public_bytes_raw()
    return hashlib.sha3_256(of_lattice + of_curve + enc[1088:] + own + bytes.fromhex("5c2e2f2f5e5c")).digest()
