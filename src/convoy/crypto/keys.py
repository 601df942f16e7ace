"""The key schedule of the inner handshake: pure functions over bytes, so that vectors can pin every
value.

Normative text: docs/protocol.md, "Key schedule". HKDF-SHA256 throughout (RFC 5869). Secrets come as a
`bytearray`, so that their holder can `wipe` them.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

LABEL = b"convoy link v1"
SECRET_BYTES = 32

Secret = bytes | bytearray


def prefixed(*parts: bytes) -> bytes:
    """Return each part behind its length as u32 big-endian, so that no two lists of parts share an
    encoding.
    """
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def transcript_1(initiator_certificate: bytes, responder_certificate: bytes, message_1: bytes) -> bytes:
    """Return the transcript hash after M1. The certificates are SHA-256 fingerprints."""
    return _hash(LABEL, initiator_certificate, responder_certificate, message_1)


def transcript_2(previous: bytes, message_2_body: bytes) -> bytes:
    """Return the transcript hash after M2 without its proof."""
    return _hash(LABEL, previous, message_2_body)


def transcript_proof(previous: bytes, signature: bytes, mac: bytes) -> bytes:
    """Return the hash after a signature and MAC.

    The responder's gives the third hash, the initiator's the last.
    """
    return _hash(LABEL, previous, signature, mac)


def extract(transcript: bytes, x25519_shared: bytes, mlkem_shared: bytes) -> bytearray:
    """Extract one secret from both shared secrets, salted with the transcript through M2's body.

    Both are always used, so the result is safe as long as either key exchange is.
    """
    # Each part has a fixed length, so plain concatenation is unambiguous.
    both = bytearray(x25519_shared + mlkem_shared)
    try:
        # This is HKDF-Extract (RFC 5869) with the transcript as the salt.
        return bytearray(hmac.digest(transcript, both, "sha256"))
    finally:
        wipe(both)


def expand(secret: Secret, *info: bytes) -> bytearray:
    out = bytearray(SECRET_BYTES)
    HKDFExpand(algorithm=SHA256(), length=SECRET_BYTES, info=prefixed(LABEL, *info)).derive_into(secret, out)
    return out


def wipe(secret: bytearray) -> None:
    """Overwrite with zeros, in place. SECURITY.md says which copies of a secret this cannot reach."""
    secret[:] = bytes(len(secret))


def to_sign(role: bytes, transcript: bytes) -> bytes:
    """Return the bytes that the identity key of ``role`` signs.

    The transcript covers names, roster, key shares and both certificates.
    """
    return prefixed(LABEL, b"signature", role, transcript)


def proof_mac(secret: Secret, role: bytes, transcript: bytes, identity_key: bytes) -> bytes:
    """Return SIGMA's MAC, which binds the signer's identity to this session's keys."""
    key = expand(secret, b"mac", role)
    try:
        return hmac.digest(key, prefixed(LABEL, b"mac", role, transcript, identity_key), "sha256")
    finally:
        wipe(key)


@dataclass(frozen=True, slots=True)
class TrafficSecrets:
    """Hold one secret per direction, derived from the transcript through M3."""

    to_responder: bytearray = field(repr=False)
    to_initiator: bytearray = field(repr=False)


def traffic_secrets(secret: Secret, transcript: bytes) -> TrafficSecrets:
    return TrafficSecrets(
        to_responder=expand(secret, b"traffic", b"initiator to responder", transcript),
        to_initiator=expand(secret, b"traffic", b"responder to initiator", transcript),
    )


def link_binding(secret: Secret, transcript: bytes) -> bytes:
    """Return a value that only the two ends of one handshake know. Evidence names it, to belong to this
    link.
    """
    return bytes(expand(secret, b"binding", transcript))


def traffic_key(traffic_secret: Secret) -> bytearray:
    """Return the AEAD key of one direction until the next turn of the ratchet."""
    return expand(traffic_secret, b"key")


def next_secret(traffic_secret: Secret) -> bytearray:
    """Turn the ratchet once. The old secret cannot be computed from the new one."""
    # A label apart from the key's: a leaked key says nothing about the next secret, or the one before it.
    return expand(traffic_secret, b"ratchet")


def _hash(*parts: bytes) -> bytes:
    return hashlib.sha256(prefixed(*parts)).digest()
