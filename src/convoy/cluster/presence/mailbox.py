"""The queue for messages of peers to the head before a plan is active."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from convoy.cluster.weights.progress_watch import ProgressWatch
from convoy.errors import ConvoyError, LinkBroken, PeerRefused, PeerUnreachable
from convoy.transport.link.inbox import Inbox, weight_of
from convoy.transport.link.link import Link, Received, ReceivedMessage
from convoy.wire.messages.control import Message, Progress, Refuse, StepFailed

M = TypeVar("M", bound=Message)
_WATCH_S = 0.5


class KernelRefused(PeerRefused):
    """Say that ``member`` offered ``kernel`` but cannot run it on the shapes of the plan's model."""

    def __init__(self, message: str, member: str, kernel: str, *, hint: str | None) -> None:
        super().__init__(message, hint=hint)
        self.member = member
        self.kernel = kernel


class MemoryRefused(PeerRefused):
    """Say that ``member`` has less free memory than it offered: ``memory_bytes``."""

    def __init__(self, message: str, member: str, memory_bytes: int, *, hint: str | None) -> None:
        super().__init__(message, hint=hint)
        self.member = member
        self.memory_bytes = memory_bytes


class PlanMailbox:
    """Collect one answer of a given type from each of several peers, within a deadline.

    The queue is bounded: a receiver thread that finds its link's share full waits, which holds its peer
    back. ``watch`` is called while waiting; an error that it raises ends the wait. Messages of another
    plan than that of ``plan_id`` are ignored. ``failed`` names the peer because of which `gather`
    raised.
    """

    def __init__(self, watch: Callable[[], None] | None = None, plan_id: int = 0) -> None:
        self.failed: str | None = None
        self._plan_id = plan_id
        self._items: Inbox[tuple[str, Message | ConvoyError]] = Inbox()
        self._watch = watch or (lambda: None)

    def deliver(self, link: Link, received: Received) -> None:
        # No hidden state belongs here: no step is under way.
        if isinstance(received, ReceivedMessage) and received.plan_id == self._plan_id:
            self._items.put(link, (link.peer, received.message), weight_of(received))

    def lost(self, link: Link, error: ConvoyError) -> None:
        self._items.put_last(link, (link.peer, error))

    def close(self) -> None:
        """Stop collecting. Receiver threads that wait here go on."""
        self._items.close()

    def gather(
        self,
        peers: Iterable[str],
        kind: type[M],
        timeout_s: float,
        on_progress: Callable[[str, Progress], None] | None = None,
    ) -> dict[str, M]:
        """Return one ``kind`` of message from each peer.

        The deadline starts anew when a peer that fetches or checks weights reports progress.
        Raises `PeerRefused`, `LinkBroken` or `PeerUnreachable`, naming the member.
        """
        missing = set(peers)
        answers: dict[str, M] = {}
        deadline = time.monotonic() + timeout_s
        watch = ProgressWatch()
        while missing:
            peer, message = self._next(deadline, missing, kind, timeout_s)
            if isinstance(message, Progress):
                if message.stage and watch.is_further(peer, message):
                    deadline = time.monotonic() + timeout_s
                if on_progress is not None:
                    on_progress(peer, message)
            elif isinstance(message, kind) and peer in missing:
                answers[peer] = message
                missing.discard(peer)
        return answers

    def _next(
        self, deadline: float, missing: set[str], kind: type[M], timeout_s: float
    ) -> tuple[str, Message]:
        while True:
            self._watch()
            left = deadline - time.monotonic()
            try:
                peer, item = self._items.get(max(0.0, min(left, _WATCH_S)))
            except queue.Empty:
                if left > 0:
                    continue
                self.failed = min(missing)
                names = ", ".join(sorted(missing))
                raise PeerUnreachable(
                    f"{names} sent no {kind.__name__} within {timeout_s:g} s",
                    hint="look at that member's own output",
                ) from None
            if isinstance(item, ConvoyError | Refuse | StepFailed):
                self.failed = peer
            match item:
                case ConvoyError():
                    raise LinkBroken(f"the link to {peer} ended: {item.message}", hint=item.hint) from item
                case Refuse(reason=reason, hint=hint, kernel=kernel, memory_bytes=memory_bytes):
                    text = f"{peer} refused the plan: {reason}"
                    if kernel:
                        raise KernelRefused(text, peer, kernel, hint=hint or None)
                    if memory_bytes is not None:
                        raise MemoryRefused(text, peer, memory_bytes, hint=hint or None)
                    raise PeerRefused(text, hint=hint or None)
                case StepFailed(reason=reason):
                    raise PeerRefused(f"{peer} could not follow: {reason}")
                case _:
                    return peer, item
