"""Sign evidence: a member signs its claims when it is challenged, and its hardware signs with it.

Both signatures cover the binding of the link's handshake, the verifier's nonce and the attester's identity
key. So evidence is good for one challenge on one link of one member, and for nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from convoy.crypto.keys import prefixed
from convoy.wire.messages.evidence import Evidence

LABEL = b"convoy attestation v1"
PROVIDER_LABEL = b"convoy provider evidence v1"
NONCE_BYTES = 32

Sign = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class Occasion:
    """Name the use of evidence: one challenge (``nonce``) on one link (``binding``) to one member."""

    binding: bytes = field(repr=False)
    nonce: bytes
    identity_key: bytes


def qualifying_data(occasion: Occasion, claims: bytes) -> bytes:
    """Return the 32 bytes that hardware signs beside its own measurements."""
    return hashlib.sha256(_prefixed(b"quote", occasion, claims)).digest()


def evidence_bytes(occasion: Occasion, claims: bytes, kind: str, parts: Sequence[bytes]) -> bytes:
    """Return the bytes that the identity key signs."""
    return _prefixed(b"evidence", occasion, claims, kind.encode(), *parts)


def make_evidence(
    sign: Sign, occasion: Occasion, claims: bytes, hardware: tuple[str, Sequence[bytes]] = ("", ())
) -> Evidence:
    """Return signed claims with a hardware statement.

    ``hardware`` is its kind and its parts, empty without any.
    """
    kind, parts = hardware
    return Evidence(claims, sign(evidence_bytes(occasion, claims, kind, parts)), kind, list(parts))


def provider_binding(provider: bytes) -> bytes:
    """Return the stand-in for a link's binding, for a member that proves itself for this provider.

    ``provider`` is the provider's identity key. A member takes it from the link that it was asked on and from
    its roster, so its evidence counts for no other provider.
    """
    # Its own label keeps this apart from the binding of any real link.
    return hashlib.sha256(prefixed(PROVIDER_LABEL, b"member of", provider)).digest()


def provider_purpose(coordinator: bytes, nonce: bytes, request_key: bytes, expires_s: int) -> bytes:
    """Return the stand-in for a nonce: the coordinator's key and challenge, and the key for requests.

    A verifier that made the challenge knows the evidence to be fresh. For any other verifier that has the key
    for requests and its expiry, the evidence is at most as old as that key.
    """
    said = (coordinator, nonce, request_key, expires_s.to_bytes(8, "big"))
    return hashlib.sha256(prefixed(PROVIDER_LABEL, b"purpose", *said)).digest()


def _prefixed(what: bytes, occasion: Occasion, *rest: bytes) -> bytes:
    return prefixed(LABEL, what, occasion.binding, occasion.nonce, occasion.identity_key, *rest)
