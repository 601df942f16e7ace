"""How a head has its peers prove themselves to others: to its coordinator, and to proxies."""

from __future__ import annotations

from typing import Annotated

import msgspec

from convoy.wire.messages.control import Evidence, Message, Part, Register

Purpose = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Vouch(Message, frozen=True):
    """Head to peer: prove what you are for this purpose (`trust.evidence.evidence.provider_purpose`)."""

    purpose: Purpose
    pcrs: Annotated[list[Register], msgspec.Meta(max_length=24)]


class Vouched(Message, frozen=True):
    """Answer to the `Vouch` of this purpose: evidence that goes on as it is. Its fields are `Evidence`'s."""

    purpose: Purpose
    claims: Annotated[bytes, msgspec.Meta(max_length=32 * 1024)]
    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
    kind: Annotated[str, msgspec.Meta(max_length=32)]
    parts: Annotated[list[Part], msgspec.Meta(max_length=32)]

    @classmethod
    def of(cls, purpose: bytes, evidence: Evidence) -> Vouched:
        return cls(purpose, evidence.claims, evidence.signature, evidence.kind, evidence.parts)
