"""A request sealed to one provider's key: HPKE (RFC 9180) in base mode, one message, one use.

The KEM is X-Wing's pair, ML-KEM-768 with X25519, so that a recording of today stays closed later. The
asking client is not authenticated here: the coordinator counts the requests of each client, and must not
read them. All fields beside the sealed body are bound to it through HPKE's ``info``.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes, hpke
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from convoy.crypto.sealed.padding import most_unpadded, pad, padded_size, unpad
from convoy.errors import SealError

VERSION = 1
ANSWER_SECRET_BYTES = 32
MAX_SEALED_BYTES = 16 * 1024 * 1024
# ML-KEM-768, then X25519.
PUBLIC_KEY_BYTES = 1184 + 32
KEY_ID_BYTES = 16

_LABEL = b"convoy sealed request v1"
_SUITE = hpke.Suite(hpke.KEM.MLKEM768_X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_256_GCM)
_LEAST_BODY = 1024
_MLKEM_BYTES = 1184
# The messages of both key exchanges, and the tag.
_ADDED_BYTES = 1088 + 32 + 16


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """Hold the fields that the coordinator reads beside a sealed body.

    The provider refuses a body that was sealed with other fields. ``expires_s`` is Unix time in whole
    seconds. ``kind`` names the API. It is among the sealed fields, so one kind cannot become another on the
    way.
    """

    provider: str
    key_id: bytes
    model: str
    request_id: str
    lease: bytes
    expires_s: int
    max_tokens: int
    kind: str

    def info(self) -> bytes:
        """Return HPKE's ``info``: a label, the version, and each field behind its length."""
        fields = [
            self.provider.encode(),
            self.key_id,
            self.model.encode(),
            self.request_id.encode(),
            self.lease,
            self.expires_s.to_bytes(8, "big"),
            self.max_tokens.to_bytes(8, "big"),
            self.kind.encode(),
        ]
        return _LABEL + bytes([VERSION]) + b"".join(len(one).to_bytes(4, "big") + one for one in fields)


@dataclass(frozen=True, slots=True)
class OpenedRequest:
    """Hold the body, and the secret under which its answer is sealed."""

    body: bytes
    answer_secret: bytes

    # Neither prompt nor key may reach logs or error texts, so the text form leaves them out.
    def __repr__(self) -> str:
        return f"OpenedRequest({len(self.body)} bytes)"


class RequestKey:
    """Hold a provider's key pair for sealed requests, in memory alone."""

    def __init__(self, mlkem_seed: bytes | None = None, x25519: bytes | None = None) -> None:
        """Generate a random pair. Test vectors give both halves."""
        lattice = (
            MLKEM768PrivateKey.generate()
            if mlkem_seed is None
            else MLKEM768PrivateKey.from_seed_bytes(mlkem_seed)
        )
        curve = X25519PrivateKey.generate() if x25519 is None else X25519PrivateKey.from_private_bytes(x25519)
        self._private = hpke.MLKEM768X25519PrivateKey(lattice, curve)
        self.public = lattice.public_key().public_bytes_raw() + curve.public_key().public_bytes_raw()

    @property
    def key_id(self) -> bytes:
        """Return the id of the public key."""
        return key_id_of(self.public)

    def open(self, facts: RequestFacts, sealed: bytes) -> OpenedRequest:
        """Open a sealed request. Raises `SealError` for another key, other facts or changed bytes."""
        if facts.key_id != self.key_id:
            raise SealError("a request is sealed to another key of this provider, or to another provider")
        if len(sealed) > MAX_SEALED_BYTES:
            raise SealError(f"a sealed request has {len(sealed)} bytes, and the limit is {MAX_SEALED_BYTES}")
        try:
            plain = unpad(_SUITE.decrypt(sealed, self._private, info=facts.info()))
        except (InvalidTag, ValueError):
            raise SealError("a sealed request does not open: it, or a field beside it, was changed") from None
        if len(plain) < ANSWER_SECRET_BYTES:
            raise SealError("a sealed request has no secret for its answer")
        return OpenedRequest(plain[ANSWER_SECRET_BYTES:], plain[:ANSWER_SECRET_BYTES])


def key_id_of(public: bytes) -> bytes:
    """Return the first KEY_ID_BYTES of the SHA-256 of a public key."""
    digest = hashes.Hash(hashes.SHA256())
    digest.update(public)
    return digest.finalize()[:KEY_ID_BYTES]


def seal_request(public: bytes, facts: RequestFacts, body: bytes) -> tuple[bytes, bytes]:
    """Return the sealed body, and the fresh secret in it.

    Raises `SealError` for an invalid key or too large a body.
    """
    if len(public) != PUBLIC_KEY_BYTES or facts.key_id != key_id_of(public):
        raise SealError(f"a provider's key of {len(public)} bytes is not the one that is named")
    secret = secrets.token_bytes(ANSWER_SECRET_BYTES)
    plain = pad(secret + body, _LEAST_BODY)
    if len(plain) + PUBLIC_KEY_BYTES > MAX_SEALED_BYTES:
        raise SealError(f"a request has {len(body)} bytes, and the limit is {MAX_SEALED_BYTES} once sealed")
    try:
        key = hpke.MLKEM768X25519PublicKey(
            MLKEM768PublicKey.from_public_bytes(public[:_MLKEM_BYTES]),
            X25519PublicKey.from_public_bytes(public[_MLKEM_BYTES:]),
        )
        return _SUITE.encrypt(plain, key, info=facts.info()), secret
    except ValueError:
        raise SealError("a provider's key for sealed requests is not one") from None


def most_body_bytes(sealed_bytes: int) -> int:
    """Return how many bytes of body a sealed request of that size may hold at most."""
    return max(0, most_unpadded(sealed_bytes - _ADDED_BYTES) - ANSWER_SECRET_BYTES)


def sealed_size(body_bytes: int) -> int:
    """Return the size that `seal_request` makes of so many bytes."""
    return padded_size(ANSWER_SECRET_BYTES + body_bytes, _LEAST_BODY) + _ADDED_BYTES


def request_hash(facts: RequestFacts, sealed: bytes) -> bytes:
    """Return the SHA-256 over the facts and the sealed body, to which an answer's keys are bound."""
    digest = hashes.Hash(hashes.SHA256())
    info = facts.info()
    digest.update(len(info).to_bytes(4, "big") + info)
    digest.update(sealed)
    return digest.finalize()
