"""What is known of a link from its first moment."""

from __future__ import annotations

from dataclasses import dataclass, field

from convoy.transport.member import Member


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """What a handshake came to. ``member``: the peer as our roster of ``epoch`` lists it.

    ``peer_epoch`` is the peer's; where it is not ours, the link is for the newer roster alone.
    """

    member: Member
    link_id: bytes
    binding: bytes = field(repr=False)
    replaces: bytes
    cipher: str
    cluster_id: str
    epoch: int
    peer_epoch: int
