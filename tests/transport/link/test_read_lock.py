"""The right to read a link: however threads meet, no connection with bytes to read is left without a
reader.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from convoy.transport.link.read_lock import ReadLock

pytestmark = pytest.mark.skipif(not hasattr(__import__("select"), "epoll"), reason="needs epoll")


class Bare:
    """Stand for a stream of which nothing but the descriptor is asked."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        return self._end.fileno()

    def pending(self) -> int:
        return 0


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    with ExitStack() as stack:
        yield [tuple(stack.enter_context(end) for end in socket.socketpair()) for _ in range(2)]  # type: ignore[misc]


def test_what_is_borrowed_wakes_the_receiver_once_it_is_given_back(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    turn, (mine, other) = ReadLock(), pairs[0]
    turn.watch(Bare(mine))
    turn.borrow()
    other.send(b"x")
    assert not turn.has_come()
    turn.give_back()
    assert turn.has_come()
    turn.end()


def test_a_connection_that_is_replaced_while_it_is_borrowed_wakes_the_receiver(
    pairs: list[tuple[socket.socket, socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    turn, (old, _), (fresh, other) = ReadLock(), *pairs
    turn.watch(Bare(old))
    real, borrowing, go_on = turn.arm, threading.Event(), threading.Event()

    def arm(events: int) -> None:
        borrowing.set()
        assert go_on.wait(10)
        real(events)

    monkeypatch.setattr(turn, "arm", arm)
    borrows = threading.Thread(target=turn.borrow)
    replaces = threading.Thread(target=turn.watch, args=(Bare(fresh),))
    borrows.start()
    assert borrowing.wait(10)
    replaces.start()
    replaces.join(0.2)  # it may have to wait for the other
    go_on.set()
    borrows.join(10)
    replaces.join(10)
    turn.give_back()
    other.send(b"x")
    assert turn.has_come()
    turn.end()


@pytest.mark.parametrize("awake_s", [0.0, 10.0], ids=["asleep", "awake"])
def test_what_comes_is_seen_by_who_waits_asleep_or_awake(
    pairs: list[tuple[socket.socket, socket.socket]], awake_s: float
) -> None:
    turn, (mine, other) = ReadLock(), pairs[0]
    turn.watch(Bare(mine))
    assert not turn.is_there(0.01, awake_s=awake_s), "nothing came, and no longer than asked for is waited"
    sending = threading.Timer(0.05, other.send, [b"x"])
    sending.start()
    assert turn.is_there(20.0, awake_s=awake_s)
    sending.join()
    turn.end()
