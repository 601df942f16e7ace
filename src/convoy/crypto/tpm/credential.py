"""A credential that only one TPM can open, and only for one of its keys (TPM 2.0 Library, Part 1, 24).

The operator encrypts a secret to an endorsement key together with the name of an attestation key. A TPM
returns the secret only if it holds both keys. So the answer shows that the attestation key lives in the
machine with the endorsement key that the manufacturer certified.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from cryptography.hazmat.decrepit.ciphers.modes import CFB
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES

from convoy.crypto.keys import prefixed
from convoy.crypto.tpm.structures import PublicArea, check_endorsement_key
from convoy.errors import AttestationError

SECRET_BYTES = 32

_SEED_BYTES = 32
_PROOF_LABEL = b"convoy attestation v1 activation"


def make_credential(endorsement: PublicArea, name: bytes, secret: bytes) -> tuple[bytes, bytes]:
    """Return (TPM2B_ID_OBJECT, TPM2B_ENCRYPTED_SECRET) for TPM2_ActivateCredential.

    Raises `AttestationError` if the endorsement key is not of the default kind.
    """
    check_endorsement_key(endorsement)
    seed = secrets.token_bytes(_SEED_BYTES)
    # The TPM expects this label, with its final zero byte.
    oaep = padding.OAEP(padding.MGF1(hashes.SHA256()), hashes.SHA256(), b"IDENTITY\0")
    # `check_endorsement_key` has checked this already; the type checker needs to see it.
    if not isinstance(endorsement.key, rsa.RSAPublicKey):
        raise AttestationError("the endorsement key is not an RSA key")
    encrypted_seed = endorsement.key.encrypt(seed, oaep)
    # The TPM expects a zero IV. That is safe, because the key comes from a fresh seed and is used once.
    cipher = Cipher(AES(_kdfa(seed, b"STORAGE", name, 128)), CFB(bytes(16))).encryptor()
    identity = cipher.update(_sized(secret)) + cipher.finalize()
    integrity = _kdfa(seed, b"INTEGRITY", b"", 256)
    outer = hmac.digest(integrity, identity + name, hashlib.sha256)
    return _sized(_sized(outer) + identity), _sized(encrypted_seed)


def activation_proof(secret: bytes, member: str, identity_key: bytes, name: bytes) -> bytes:
    """Return a member's answer (32 bytes): it proves the secret without sending it, for this member and
    these keys.
    """
    return hmac.digest(secret, prefixed(_PROOF_LABEL, member.encode(), identity_key, name), hashlib.sha256)


def check_proof(expected: bytes, given: bytes) -> None:
    """Compare two proofs in constant time. Raises `AttestationError` if they differ."""
    if not hmac.compare_digest(expected, given):
        raise AttestationError("the answer does not prove that the credential was opened")


def _kdfa(key: bytes, label: bytes, context: bytes, bits: int) -> bytes:
    """Derive a key with KDFa of Part 1, 11.4.10.2, and SHA-256. One block is enough for up to 256 bits."""
    block = (1).to_bytes(4, "big") + label + b"\0" + context + bits.to_bytes(4, "big")
    return hmac.digest(key, block, hashlib.sha256)[: bits // 8]


def _sized(data: bytes) -> bytes:
    return len(data).to_bytes(2, "big") + data
