"""Messages that ask for evidence of a member's state and answer with it.

A `Challenge` is for the member at the other end of the link. A `Vouch` is for others: for the head's
coordinator, and for proxies.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from convoy.wire.messages.control import FrameRow, FrameType, Message, Sender

Register = Annotated[int, msgspec.Meta(ge=0, le=23)]
Part = Annotated[bytes, msgspec.Meta(max_length=4096)]
Purpose = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Challenge(Message, frozen=True):
    """Ask the member at the other end to prove its state, now and on this link (verifier to attester).

    Either side of a head's link may be the verifier.
    """

    frame = FrameRow(FrameType.CHALLENGE, 4 * 1024, Sender.HEAD | Sender.PEER)

    # Random, never used twice.
    nonce: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    # The registers to quote from the SHA-256 bank, ascending.
    pcrs: Annotated[list[Register], msgspec.Meta(max_length=24)]


class Evidence(Message, frozen=True):
    """Answer a `Challenge`. ``claims`` encodes `Claims`; ``kind`` names the hardware, or is empty."""

    frame = FrameRow(FrameType.EVIDENCE, 64 * 1024, Sender.HEAD | Sender.PEER)

    claims: Annotated[bytes, msgspec.Meta(max_length=32 * 1024)]
    # By the identity key, over the binding of the link, the nonce and all of this.
    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
    kind: Annotated[str, msgspec.Meta(max_length=32)]
    # The statements of that kind of hardware, in the order that the kind defines.
    parts: Annotated[list[Part], msgspec.Meta(max_length=32)]


class Vouch(Message, frozen=True):
    """Ask a peer to prove its state for this purpose (`trust.evidence.evidence.provider_purpose`; head to
    peer).
    """

    frame = FrameRow(FrameType.VOUCH, 256, Sender.HEAD)

    purpose: Purpose
    pcrs: Annotated[list[Register], msgspec.Meta(max_length=24)]


class Vouched(Message, frozen=True):
    """Answer the `Vouch` of this purpose with evidence that is passed on unchanged.

    The fields are `Evidence`'s.
    """

    frame = FrameRow(FrameType.VOUCHED, 64 * 1024, Sender.PEER)

    purpose: Purpose
    claims: Annotated[bytes, msgspec.Meta(max_length=32 * 1024)]
    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
    kind: Annotated[str, msgspec.Meta(max_length=32)]
    parts: Annotated[list[Part], msgspec.Meta(max_length=32)]

    @classmethod
    def of(cls, purpose: bytes, evidence: Evidence) -> Vouched:
        return cls(purpose, evidence.claims, evidence.signature, evidence.kind, evidence.parts)
