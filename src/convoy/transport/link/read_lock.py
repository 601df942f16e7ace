"""The right to read a link: its receiver thread has it, or a waiting thread that borrows the connection.

Waking one thread to have it wake another costs more than opening a small tensor. So a waiting thread may
borrow the connection and read by itself. The receiver then sleeps through all arrivals until the
connection is given back. This needs a system that can report readable descriptors without waking every
watcher: Linux, over TCP.
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
    """Describe a stream that the system can watch for bytes to read."""

    def fileno(self) -> int:
        """Return the descriptor, or a negative number once it is closed."""
        ...

    def pending(self) -> int:
        """Return the number of bytes that were read from the descriptor but not yet taken by
        ``recv_into``.
        """
        ...


class ReadLock:
    """Decide which thread reads one link. The reading thread holds `lock`, so that frames stay in order."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        # Guards the loan's state and the epoll registration, which must change together.
        self._lending = threading.Lock()
        self._stream: Watchable | None = None
        self._epoll: select.epoll | None = None
        self._poll: select.poll | None = None
        self._wake = -1
        self._fd = -1
        self._is_lent = False
        self._in_use = False

    @property
    def lends(self) -> bool:
        """Return whether this connection can be borrowed."""
        return self._stream is not None

    def watch(self, stream: object) -> None:
        """Set the connection that is read from now on. It is not on loan."""
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
        # A descriptor that was closed meanwhile is found by the next read.
        with contextlib.suppress(OSError):
            self._epoll.register(self._fd, select.EPOLLIN)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self._stream, self._is_lent = stream, False

    def end(self) -> None:
        """Free the system's resources. The receiver calls this last."""
        with self.lock:
            self._stream = None
            if self._epoll is not None:
                self._epoll.close()
                os.close(self._wake)
                self._epoll = None

    # The receiver thread.

    def has_come(self) -> bool:
        """Wait a moment for readable bytes on a connection that is not on loan, and return whether there
        are any.

        Return True also where the connection cannot be borrowed.
        """
        epoll = self._epoll
        if self._stream is None or epoll is None or self._stream.pending():
            return True
        events = epoll.poll(_LOOK_UP_S)
        # Nothing came for a moment, so a loan that its borrower forgot can end.
        if not events:
            self._take_back()
        for fd, _ in events:
            if fd == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
        return bool(events)

    def is_there(self, timeout_s: float = 0.0, *, awake_s: float = 0.0) -> bool:
        """Return whether there are bytes to read, or the end of the stream.

        Wait up to ``timeout_s``, with `lock` held.

        For the first ``awake_s`` poll repeatedly and yield in between, because a sleeping thread is woken
        late.
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
        # True also for a descriptor that was closed, so that the reader finds the end.
        return bool(poll.poll(1000 * timeout_s))

    # The thread that borrows.

    def borrow(self) -> None:
        """Stop arrivals from waking the receiver, until `give_back`, or until a while after `done`."""
        with self._lending:
            self._in_use = True
            if not self._is_lent:
                self._is_lent = True
                self.arm(0)

    def done(self) -> None:
        """Pause the loan's use: this thread does not read now, but will soon."""
        self._in_use = False

    def give_back(self) -> None:
        """End the loan, so that arrivals wake the receiver, also those that came before."""
        self.done()
        self._take_back()

    def _take_back(self) -> None:
        """End the loan unless it is in use. This also ends a loan that its borrower forgot."""
        with self._lending:
            if self._is_lent and not self._in_use:
                self._is_lent = False
                self.arm(select.EPOLLIN)

    def wake(self) -> None:
        """Wake the receiver, which has something to do even if nothing arrives. Call it with `lock` held."""
        # After `end` the system may have reused the descriptor's number.
        if self._epoll is not None:
            os.eventfd_write(self._wake, 1)

    def arm(self, events: int) -> None:
        """Let the receiver wake at these events of its connection. Call it with `lock` held."""
        epoll, fd = self._epoll, self._fd
        if epoll is not None and fd >= 0:
            # The descriptor may be closed already. The receiver then finds the end by itself.
            with contextlib.suppress(OSError, ValueError):
                epoll.modify(fd, events)


def until(at_s: float, longest_s: float) -> float:
    """Return the seconds from now until ``at_s``, between 0 and ``longest_s``."""
    return max(0.0, min(at_s - time.monotonic(), longest_s))
