"""Evidence: what a member signs about itself when it is challenged, and what its hardware signs with it.

Both signatures cover the binding of the link's handshake, the verifier's nonce and the attester's identity
key, so evidence is good for one challenge on one link of one member, and for nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from convoy.crypto.keys import prefixed
from convoy.wire.messages import Evidence

LABEL = b"convoy attestation v1"
NONCE_BYTES = 32

Sign = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class Occasion:
    """What evidence is good for: one challenge (``nonce``) on one link (``binding``) to one member."""

    binding: bytes = field(repr=False)
    nonce: bytes
    identity_key: bytes


def qualifying_data(occasion: Occasion, claims: bytes) -> bytes:
    """The 32 bytes that hardware signs beside its own measurements."""
    return hashlib.sha256(_prefixed(b"quote", occasion, claims)).digest()


def evidence_bytes(occasion: Occasion, claims: bytes, kind: str, parts: Sequence[bytes]) -> bytes:
    """What the identity key signs."""
    return _prefixed(b"evidence", occasion, claims, kind.encode(), *parts)


def make_evidence(
    sign: Sign, occasion: Occasion, claims: bytes, hardware: tuple[str, Sequence[bytes]] = ("", ())
) -> Evidence:
    """Sign claims and a hardware statement. ``hardware``: its kind and its parts, empty without any."""
    kind, parts = hardware
    return Evidence(claims, sign(evidence_bytes(occasion, claims, kind, parts)), kind, list(parts))


def _prefixed(what: bytes, occasion: Occasion, *rest: bytes) -> bytes:
    return prefixed(LABEL, what, occasion.binding, occasion.nonce, occasion.identity_key, *rest)
