"""Messages that the two ends of a link handle themselves: liveness, a newer roster, fresh keys and the end.

`transport.link` answers them, so no handler of a member sees one.
"""

from __future__ import annotations

from convoy.wire.messages.control import MAX_ROSTER_BYTES, FrameRow, FrameType, Message, Sender


class RosterUpdate(Message, frozen=True):
    """Send the peer a newer roster: the operator's file, byte for byte. It is verified before it is
    parsed.
    """

    frame = FrameRow(FrameType.ROSTER, MAX_ROSTER_BYTES + 64, Sender.LINK)

    signed: bytes


class Ping(Message, frozen=True):
    """Ask for a `Pong` with the same token, at once."""

    frame = FrameRow(FrameType.PING, 64, Sender.LINK)

    token: int


class Pong(Message, frozen=True):
    """Answer a `Ping`."""

    frame = FrameRow(FrameType.PONG, 64, Sender.LINK)

    token: int


class Switch(Message, frozen=True):
    """End a connection: all later frames of this direction take the connection of ``link_id``.

    It is also the first frame of a listener on new connections: it keeps them for the link that they are
    to carry.
    """

    frame = FrameRow(FrameType.SWITCH, 64, Sender.LINK)

    link_id: bytes


class Bye(Message, frozen=True):
    """Announce that the sender is about to end the link on purpose."""

    frame = FrameRow(FrameType.BYE, 1024, Sender.LINK, prose={"reason": 200})

    reason: str
