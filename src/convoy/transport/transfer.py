"""Bring two ends to one roster after a handshake between two epochs.

The newer roster goes over the sealed link, which then ends. The end that lags verifies and adopts it
before it says goodbye, so that the dialler's next handshake finds both ends at one epoch. All of it
happens within the handshake's deadline.
"""

from __future__ import annotations

from convoy.crypto.claims import incompatible_epoch
from convoy.errors import ConvoyError, Incompatible, LinkBroken, PeerError
from convoy.transport.link.incoming import ReceivedMessage
from convoy.transport.link.link import Link
from convoy.transport.link.outgoing import message_frame
from convoy.transport.link.replacement import Connections
from convoy.transport.membership import Membership
from convoy.wire.messages.control import Message
from convoy.wire.messages.link import Bye, RosterUpdate

ADOPTED = "adopted"
_REFUSED = "refused"
_ROSTER = frozenset({RosterUpdate.frame.type})
_BYE = frozenset({Bye.frame.type})


def settle(link: Link, membership: Membership) -> bool:
    """Return True if both ends hold one epoch.

    Otherwise send or take the newer roster, end the link, return False.

    Raises `Incompatible`, naming both epochs, if the end that lags refused it, or it never came.
    """
    ours, theirs = link.facts.epoch, link.facts.peer_epoch
    if ours == theirs:
        return True
    # The link was not started, so its two halves can be used directly.
    connections = link.release()
    try:
        if ours > theirs:
            _give(connections, membership)
        else:
            _take(connections, link.peer, membership, ours)
    except ConvoyError as error:
        differ = incompatible_epoch(link.peer, theirs, ours)
        raise Incompatible(f"{differ.message}; {error.message}", hint=differ.hint) from error
    finally:
        connections.close()
    return False


def _give(connections: Connections, membership: Membership) -> None:
    _send(connections, RosterUpdate(membership.signed))
    received = connections.incoming.receive(_BYE)
    said = received.message if isinstance(received, ReceivedMessage) else None
    if not isinstance(said, Bye) or said.reason != ADOPTED:
        raise LinkBroken("it refused the newer one")


def _take(connections: Connections, peer: str, membership: Membership, epoch: int) -> None:
    received = connections.incoming.receive(_ROSTER)
    update = received.message if isinstance(received, ReceivedMessage) else None
    assert isinstance(update, RosterUpdate)
    try:
        membership.offer(update.signed, peer)
    except ConvoyError as error:
        # A newer roster may have come another way in the meantime. Then this end does not lag any more.
        if membership.roster.epoch > epoch:
            _send(connections, Bye(ADOPTED))
            return
        _send(connections, Bye(_REFUSED))
        raise PeerError(f"its roster was refused: {error.message}") from error
    _send(connections, Bye(ADOPTED))


def _send(connections: Connections, message: Message) -> None:
    connections.outgoing.send(message_frame(message))
