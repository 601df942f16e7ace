"""Where the head's receiver threads leave what peers say before a plan is active."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from convoy.errors import ConvoyError, LinkBroken, PeerRefused, PeerUnreachable
from convoy.transport.link import Link, Received, ReceivedMessage
from convoy.wire.messages import Message, Progress, Refuse

M = TypeVar("M", bound=Message)


class Mailbox:
    """Collects one answer of a given type from each of several peers, within a deadline."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[tuple[str, Received | ConvoyError]] = queue.SimpleQueue()

    def deliver(self, link: Link, received: Received) -> None:
        self._items.put((link.peer, received))

    def lost(self, link: Link, error: ConvoyError) -> None:
        self._items.put((link.peer, error))

    def gather(
        self,
        peers: Iterable[str],
        kind: type[M],
        timeout_s: float,
        on_progress: Callable[[str, Progress], None] | None = None,
    ) -> dict[str, M]:
        """One ``kind`` from each peer.

        Raises `PeerRefused`, `LinkBroken` or `PeerUnreachable`, naming the member.
        """
        missing = set(peers)
        answers: dict[str, M] = {}
        deadline = time.monotonic() + timeout_s
        while missing:
            try:
                peer, item = self._items.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                names = ", ".join(sorted(missing))
                raise PeerUnreachable(
                    f"{names} sent no {kind.__name__} within {timeout_s:g} s",
                    hint="look at that member's own output",
                ) from None
            if isinstance(item, ConvoyError):
                raise LinkBroken(f"the link to {peer} ended: {item.message}", hint=item.hint) from item
            if not isinstance(item, ReceivedMessage):
                continue
            message = item.message
            if isinstance(message, Refuse):
                raise PeerRefused(f"{peer} refused the plan: {message.reason}", hint=message.hint or None)
            if isinstance(message, Progress) and on_progress is not None:
                on_progress(peer, message)
            elif isinstance(message, kind) and peer in missing:
                answers[peer] = message
                missing.discard(peer)
        return answers
