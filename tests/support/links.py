"""Started links for tests, with queues of the received items and of the ends."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass, field

from convoy.errors import ConvoyError
from convoy.transport.dial import dial
from convoy.transport.link.link import Link, Received
from convoy.transport.listen.listener import Listener
from convoy.transport.member import LocalMember
from convoy.transport.options import LinkOptions
from convoy.transport.streams.stream import Stream
from convoy.wire.messages.control import FrameType
from support.members import membership_of

ALLOWED = frozenset({FrameType.HELLO, FrameType.STEP, FrameType.HIDDEN, FrameType.REFUSE})
WAIT_S = 20.0


@dataclass(slots=True)
class End:
    """Hold one end of a started link."""

    link: Link
    arrived: queue.SimpleQueue[Received] = field(default_factory=queue.SimpleQueue)
    ended: queue.SimpleQueue[ConvoyError] = field(default_factory=queue.SimpleQueue)

    def start(self, allowed: frozenset[FrameType] = ALLOWED) -> End:
        self.link.start(
            lambda _, item: self.arrived.put(item), lambda _, error: self.ended.put(error), allowed
        )
        return self

    def next(self) -> Received:
        return self.arrived.get(timeout=WAIT_S)

    def error(self) -> ConvoyError:
        return self.ended.get(timeout=WAIT_S)


def tls_link_pair(
    me: LocalMember,
    other: LocalMember,
    *,
    through: Callable[[tuple[str, int]], tuple[str, int]] = lambda address: address,
    wrap: Callable[[Stream], Stream] | None = None,
    options: LinkOptions | None = None,
) -> tuple[Link, Link]:
    """Return both ends over loopback sockets. ``through`` maps the listener's address to the one to dial."""
    arrived: queue.SimpleQueue[Link] = queue.SimpleQueue()
    listener = Listener(("127.0.0.1", 0), membership_of(other), arrived.put, wrap=wrap, options=options)
    try:
        mine = dial(
            through(listener.address),
            me=membership_of(me),
            peer_name=other.name,
            timeout_s=WAIT_S,
            wrap=wrap,
            options=options,
        )
        return mine, arrived.get(timeout=WAIT_S)
    finally:
        listener.close()
