"""Enrolment: the computations of a newcomer and an inviting operator over an invitation; pure functions.

In order: `commit` and `hello_mac` -> `check_hello` by the inviter -> `transcript` -> `make_proof` by the
newcomer, `check_mac` and the others by the inviter -> `code` on both screens -> `listener_mac` back.
Normative text: docs/protocol.md, "Enrolment".
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from convoy.crypto.certificate import make_certificate, to_pem
from convoy.crypto.identity import Identity, verify
from convoy.crypto.keys import prefixed
from convoy.errors import HandshakeError

LABEL = b"convoy enrolment v1"
SECRET_BYTES = 16
NONCE_BYTES = 32
HASH_BYTES = 32
SIGNATURE_BYTES = 64
CODE_DIGITS = 8
MAX_UNPROVED_CHALLENGES = 20


@dataclass(frozen=True, slots=True)
class Terms:
    """Hold the facts of one invitation that both ends know when they meet.

    ``invitation`` is the hash of the token without its secret. ``fingerprint`` is the SHA-256 of the
    listener's certificate as this end saw it in TLS.
    """

    secret: bytes = field(repr=False)
    invitation: bytes
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class EnrolmentProof:
    """Hold the newcomer's second message, apart from its card."""

    nonce: bytes
    identity_signature: bytes
    tls_signature: bytes
    mac: bytes


@dataclass(frozen=True, slots=True)
class OneTimeCertificate:
    """Hold a certificate and key for one invitation. The key is in memory only."""

    certificate_der: bytes
    certificate_pem: bytes = field(repr=False)
    key_pem: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> OneTimeCertificate:
        key = Ed25519PrivateKey.generate()
        certificate = make_certificate(key)
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return cls(certificate, to_pem(certificate), pem)


def commit(nonce: bytes, card: bytes) -> bytes:
    """Return a commitment that fixes the newcomer's nonce and card before it sees the inviter's nonce.

    The commitment reveals neither of them.
    """
    return _hash(b"commitment", nonce, card)


def hello_mac(terms: Terms, commitment: bytes) -> bytes:
    """Return the MAC that ends a HELLO: it shows that the sender holds the secret of this invitation."""
    return _mac(terms.secret, b"hello", terms.invitation, terms.fingerprint, commitment)


def check_hello(terms: Terms, hello: bytes) -> bytes:
    """Return the commitment of a HELLO's body. Raises `HandshakeError` if its MAC is wrong."""
    commitment, mac = hello[:HASH_BYTES], hello[HASH_BYTES:]
    if not hmac.compare_digest(hello_mac(terms, commitment), mac):
        raise HandshakeError("its HELLO does not hold this invitation's secret")
    return commitment


def transcript(terms: Terms, commitment: bytes, inviter_nonce: bytes, nonce: bytes, card: bytes) -> bytes:
    """Return the hash of all that both ends sent, and of the certificate that carried it."""
    return _hash(b"transcript", terms.invitation, terms.fingerprint, commitment, inviter_nonce, nonce, card)


def make_proof(terms: Terms, identity: Identity, nonce: bytes, spoken: bytes) -> EnrolmentProof:
    """Sign the transcript ``spoken`` with both keys, and add a MAC that proves the secret without sending
    it.
    """
    by_identity = identity.sign(to_sign(b"identity", spoken))
    by_tls_key = identity.sign_with_tls_key(to_sign(b"tls", spoken))
    mac = newcomer_mac(terms.secret, spoken, by_identity, by_tls_key)
    return EnrolmentProof(nonce, by_identity, by_tls_key, mac)


def check_mac(secret: bytes, spoken: bytes, proof: EnrolmentProof) -> None:
    """Check the MAC before all else, so that a stranger costs one HMAC and none of its bytes are parsed.

    Raises `HandshakeError`.
    """
    expected = newcomer_mac(secret, spoken, proof.identity_signature, proof.tls_signature)
    if not hmac.compare_digest(expected, proof.mac):
        raise HandshakeError("it does not hold this invitation's secret, or spoke to another listener")


def check_signatures(spoken: bytes, proof: EnrolmentProof, identity_key: bytes, tls_key: bytes) -> None:
    """Check that the newcomer holds both keys of its card. Raises `HandshakeError`."""
    verify(identity_key, proof.identity_signature, to_sign(b"identity", spoken))
    verify(tls_key, proof.tls_signature, to_sign(b"tls", spoken))


def check_commitment(commitment: bytes, nonce: bytes, card: bytes) -> None:
    """Raise `HandshakeError` if the newcomer changed card or nonce after it saw the inviter's nonce."""
    if not hmac.compare_digest(commit(nonce, card), commitment):
        raise HandshakeError("its card or nonce is not the one that it committed to")


def to_sign(key: bytes, spoken: bytes) -> bytes:
    """Return the bytes that the ``identity`` or the ``tls`` key signs."""
    return prefixed(LABEL, b"signature", key, spoken)


def newcomer_mac(secret: bytes, spoken: bytes, identity_signature: bytes, tls_signature: bytes) -> bytes:
    """Return the MAC, over the signatures too, with which the newcomer proves the secret."""
    return _mac(secret, b"newcomer", spoken, identity_signature, tls_signature)


def listener_mac(secret: bytes, spoken: bytes, said: bytes) -> bytes:
    """Return the MAC with which the inviter proves the secret. ``said`` is ``pending``, or the signed
    roster.
    """
    return _mac(secret, b"inviter", spoken, hashlib.sha256(said).digest())


def check_listener_mac(secret: bytes, spoken: bytes, said: bytes, mac: bytes) -> None:
    """Check the inviter's MAC. Raises `HandshakeError`."""
    if not hmac.compare_digest(listener_mac(secret, spoken, said), mac):
        raise HandshakeError("the inviting machine does not hold this invitation's secret")


def code(secret: bytes, spoken: bytes) -> str:
    """Return the digits that both screens show, in two groups.

    The commitment keeps a man in the middle from searching for a code. An attacker with the secret can
    still sample: each CHALLENGE tells it the code that its proof would show. So challenges without a
    proof are limited to `MAX_UNPROVED_CHALLENGES`, and the chance of hitting the victim's code is at most
    20 in 10^8, one in 5 million.
    """
    digest = _mac(secret, b"code", spoken)
    # 256 bits modulo 10^8 favour some codes by less than 1 in 10^60, which is no help to an attacker.
    digits = f"{int.from_bytes(digest, 'big') % 10**CODE_DIGITS:0{CODE_DIGITS}d}"
    return f"{digits[: CODE_DIGITS // 2]} {digits[CODE_DIGITS // 2 :]}"


def invitation_id(secret: bytes, invitation: bytes) -> str:
    """Return 32 hex digits that name an invitation in files and logs, and reveal nothing of its secret."""
    return _mac(secret, b"id", invitation)[:16].hex()


def _mac(secret: bytes, role: bytes, *parts: bytes) -> bytes:
    # This is HKDF-Extract (RFC 5869) with LABEL as the salt.
    root = hmac.digest(LABEL, secret, "sha256")
    info = prefixed(LABEL, b"mac", role)
    key = HKDFExpand(algorithm=SHA256(), length=HASH_BYTES, info=info).derive(root)
    return hmac.digest(key, prefixed(LABEL, role, *parts), "sha256")


def _hash(*parts: bytes) -> bytes:
    return hashlib.sha256(prefixed(LABEL, *parts)).digest()
