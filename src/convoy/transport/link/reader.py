"""Deliver a link's frames in order to the thread that reads at the time: see `transport.link.read_lock`."""

from __future__ import annotations

from collections.abc import Callable

from convoy.errors import ConvoyError
from convoy.transport.link.incoming import Incoming, Received, ReceivedMessage
from convoy.transport.link.read_lock import ReadLock, until
from convoy.wire.messages.control import FrameType, Message

# How often a reading thread checks whether it should still read.
_LOOK_UP_S = 0.05


class Reader:
    """Read one link. ``is_ours`` handles the link's own messages.

    ``going`` tells that the link is not being closed.

    The receiver thread calls `run`, and `end` last. One other thread may read in its place: it must
    `borrow`, `read_here` as often as it wants, and `give_back`, or be `done` if it borrows again soon.
    """

    def __init__(
        self,
        incoming: Callable[[], Incoming],
        is_ours: Callable[[Message], bool],
        going: Callable[[], bool],
    ) -> None:
        self._incoming = incoming
        self._is_ours = is_ours
        self._going = going
        self._turn = ReadLock()
        self._watched: Incoming | None = None
        self._allowed: frozenset[FrameType] = frozenset()
        # Read by a borrower that did not take it; the receiver delivers it.
        self._left: Received | None = None
        self._error: ConvoyError | None = None
        self.borrow = self._turn.borrow
        self.done = self._turn.done
        self.give_back = self._turn.give_back

    @property
    def lends(self) -> bool:
        """Return whether `read_here` can ever read."""
        return self._turn.lends

    def run(self, deliver: Callable[[Received], None], allowed: frozenset[FrameType]) -> None:
        """Deliver until the link is being closed. Raises the error that ended it, also if a borrower met
        it.
        """
        self._allowed = allowed
        self._look_after(self._incoming())
        while self._going():
            self._incoming().deadline.begin()
            while self._going() and not (self._incoming().has_more or self._turn.has_come()):
                pass
            with self._turn.lock:
                self._deliver_next(deliver)

    def read_here(self, until_s: float, take: Callable[[Received], bool], *, awake_s: float = 0.0) -> bool:
        """Wait for the next item and pass it to ``take``.

        The receiver delivers an item that ``take`` declines.

        ``awake_s`` has the meaning of `ReadLock.is_there`. Return False if another thread reads just now,
        or if borrowing is not possible. Return True also if nothing came within a moment. Raises the
        error that ends the link. An error that ``take`` raises passes through, and ends the link too.
        """
        turn = self._turn
        if self._left is not None or not turn.lends or not turn.lock.acquire(blocking=False):
            return False
        try:
            incoming = self._incoming()
            if self._left is not None or self._error is not None or not self._going():
                return False
            if incoming.has_more or turn.is_there(until(until_s, _LOOK_UP_S), awake_s=awake_s):
                received = self._next()
                if received is not None and not take(received):
                    self._left = received
                    turn.wake()
            return True
        except ConvoyError as error:
            self._error = error
            turn.wake()
            raise
        finally:
            turn.lock.release()

    def end(self) -> None:
        """End reading for good."""
        self._turn.end()

    def _deliver_next(self, deliver: Callable[[Received], None]) -> None:
        if not self._going():
            return
        if self._error is not None:
            raise self._error
        received, self._left = self._left, None
        if received is None:
            if not (self._incoming().has_more or self._turn.is_there()):
                # A borrower has read the item meanwhile.
                return
            received = self._next()
        if received is not None and self._going():
            self._incoming().deadline.suspend()
            deliver(received)

    def _next(self) -> Received | None:
        """Receive one item. Return None if it was a message of the link itself."""
        received = self._incoming().receive(self._allowed)
        if isinstance(received, ReceivedMessage) and self._is_ours(received.message):
            if self._incoming() is not self._watched:
                self._look_after(self._incoming())
            return None
        return received

    def _look_after(self, incoming: Incoming) -> None:
        self._watched = incoming
        self._turn.watch(incoming.stream)
