"""Messages with which a head gets its peers' evidence for others: for its coordinator, and for proxies."""

from __future__ import annotations

from typing import Annotated

import msgspec

from convoy.wire.messages.control import Evidence, Message, Part, Register

Purpose = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Vouch(Message, frozen=True):
    """Ask a peer to prove its state for this purpose (`trust.evidence.evidence.provider_purpose`; head to
    peer).
    """

    purpose: Purpose
    pcrs: Annotated[list[Register], msgspec.Meta(max_length=24)]


class Vouched(Message, frozen=True):
    """Answer the `Vouch` of this purpose with evidence that is passed on unchanged.

    The fields are `Evidence`'s.
    """

    purpose: Purpose
    claims: Annotated[bytes, msgspec.Meta(max_length=32 * 1024)]
    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
    kind: Annotated[str, msgspec.Meta(max_length=32)]
    parts: Annotated[list[Part], msgspec.Meta(max_length=32)]

    @classmethod
    def of(cls, purpose: bytes, evidence: Evidence) -> Vouched:
        return cls(purpose, evidence.claims, evidence.signature, evidence.kind, evidence.parts)
