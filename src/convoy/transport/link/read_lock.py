"""Who reads a link: its receiver thread, or a thread that waits for what comes and would rather look itself.

Waking one thread to have it wake another costs more than opening a small tensor. So a thread that waits may
borrow the connection: the receiver sleeps on, whatever arrives, until it is given back. Only where the system
can say that a descriptor has something to read without waking everybody who watches it: Linux, over TCP.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from typing import Protocol, runtime_checkable

_LOOK_UP_S = 0.25


@runtime_checkable
class Watchable(Protocol):
    """A stream of which the system can say when there is something to read."""

    def fileno(self) -> int:
        """The descriptor, or a negative number once it is closed."""
        ...

    def pending(self) -> int:
        """Bytes that were read from the descriptor, and not by ``recv_into``."""
        ...


class ReadLock:
    """Of one link. `lock` is held by whoever reads and delivers, so that what comes stays in order."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._lending = threading.Lock()  # what is said of the loan and what the system was told go together
        self._stream: Watchable | None = None
        self._epoll: select.epoll | None = None
        self._poll: select.poll | None = None
        self._wake = -1
        self._fd = -1
        self._is_lent = False
        self._in_use = False

    @property
    def lends(self) -> bool:
        """Whether this connection can be borrowed."""
        return self._stream is not None

    def watch(self, stream: object) -> None:
        """The connection that is read from now on, which nobody has borrowed yet."""
        with self._lending:
            self._watch(stream)

    def _watch(self, stream: object) -> None:
        self._stream, self._fd = None, -1
        if not isinstance(stream, Watchable) or not hasattr(select, "epoll") or stream.fileno() < 0:
            return
        if self._epoll is None:
            self._epoll, self._wake = select.epoll(), os.eventfd(0, os.EFD_NONBLOCK)
            self._epoll.register(self._wake, select.EPOLLIN)
        self._fd = stream.fileno()
        with contextlib.suppress(OSError):  # closed meanwhile, which whoever reads it finds
            self._epoll.register(self._fd, select.EPOLLIN)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self._stream, self._is_lent = stream, False

    def end(self) -> None:
        """Only for the receiver, last."""
        with self.lock:
            self._stream = None
            if self._epoll is not None:
                self._epoll.close()
                os.close(self._wake)
                self._epoll = None

    # The receiver thread.

    def has_come(self) -> bool:
        """Wait a moment for something to read that nobody borrowed; also true where nobody can borrow."""
        epoll = self._epoll
        if self._stream is None or epoll is None or self._stream.pending():
            return True
        events = epoll.poll(_LOOK_UP_S)
        if not events:
            self._take_back()
        for fd, _ in events:
            if fd == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
        return bool(events)

    def is_there(self, timeout_s: float = 0.0, *, awake_s: float = 0.0) -> bool:
        """Whether there is something to read, or the end of it; waits so long. With the lock held.

        For ``awake_s`` of that it looks again and again, others may run between: who sleeps is woken late.
        """
        stream, poll = self._stream, self._poll
        if stream is None or poll is None or stream.pending():
            return True
        if awake_s:
            until_s = time.monotonic() + min(timeout_s, awake_s)
            while time.monotonic() < until_s:
                if poll.poll(0):
                    return True
                os.sched_yield()
        return bool(poll.poll(1000 * timeout_s))  # also of a descriptor that was closed

    # The thread that borrows.

    def borrow(self) -> None:
        """What arrives wakes the receiver no more, until `give_back`, or a while after `done`."""
        with self._lending:
            self._in_use = True
            if not self._is_lent:
                self._is_lent = True
                self._arm(0)

    def done(self) -> None:
        """It is not read here just now, but soon."""
        self._in_use = False

    def give_back(self) -> None:
        """What arrived, and arrives, wakes the receiver."""
        self.done()
        self._take_back()

    def _take_back(self) -> None:
        """Unless it is in use; so also from whoever forgot it."""
        with self._lending:
            if self._is_lent and not self._in_use:
                self._is_lent = False
                self._arm(select.EPOLLIN)

    def wake(self) -> None:
        """The receiver has something to do, whatever arrives. With the lock held."""
        if self._epoll is not None:  # else the descriptor may be another's by now
            os.eventfd_write(self._wake, 1)

    def _arm(self, events: int) -> None:
        epoll, fd = self._epoll, self._fd
        if epoll is not None and fd >= 0:
            with contextlib.suppress(OSError, ValueError):  # closed: the receiver finds the end of it
                epoll.modify(fd, events)


def until(at_s: float, longest_s: float) -> float:
    """Seconds from now, at most so many."""
    return max(0.0, min(at_s - time.monotonic(), longest_s))
