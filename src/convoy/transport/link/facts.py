"""The facts of a link that its handshake settles."""

from __future__ import annotations

from dataclasses import dataclass, field

from convoy.transport.member import Member


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """Hold the results of a handshake. ``member`` is the peer as our roster of ``epoch`` lists it.

    ``peer_epoch`` is the peer's epoch. Where it differs from ours, the link carries only the newer
    roster.
    """

    member: Member
    link_id: bytes
    binding: bytes = field(repr=False)
    replaces: bytes
    cipher: str
    cluster_id: str
    epoch: int
    peer_epoch: int
