"""The man in the middle: every byte between two members goes through his hands, unit by unit."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterable

from adversary.units import Measure, Splitter

Tamper = Callable[[bytes], Iterable[bytes]]
Change = Callable[[bytes], Iterable[bytes]]
WAIT_S = 90.0


class Hang(Exception):  # noqa: N818 - an order to the way, not a fault
    """End the connection after passing this on; a tamper raises it."""

    def __init__(self, last: bytes = b"") -> None:
        super().__init__()
        self.last = last


def honest(unit: bytes) -> Iterable[bytes]:
    return (unit,)


def nth(index: int, change: Change) -> Tamper:
    """Apply ``change`` to the unit with this index, counted from now."""
    count = itertools.count()
    return lambda unit: change(unit) if next(count) == index else (unit,)


def drop(_unit: bytes) -> Iterable[bytes]:
    return ()


def repeat(unit: bytes) -> Iterable[bytes]:
    return (unit, unit)


def flip(bit: int) -> Change:
    def change(unit: bytes) -> Iterable[bytes]:
        changed = bytearray(unit)
        changed[bit // 8] ^= 0x80 >> (bit % 8)
        return (bytes(changed),)

    return change


def put(offset: int, data: bytes) -> Change:
    return lambda unit: (unit[:offset] + data + unit[offset + len(data) :],)


def instead(data: bytes) -> Change:
    return lambda _unit: (data,)


def keep(num_bytes: int) -> Change:
    """Cut there, and hang up."""

    def change(unit: bytes) -> Iterable[bytes]:
        raise Hang(unit[:num_bytes])

    return change


def late(seconds: float) -> Change:
    def change(unit: bytes) -> Iterable[bytes]:
        time.sleep(seconds)  # the attack is the delay
        return (unit,)

    return change


def swap_from(index: int) -> Tamper:
    """Swap the unit with this index and the one that follows it."""
    held: list[bytes] = []
    count = itertools.count()

    def tamper(unit: bytes) -> Iterable[bytes]:
        number = next(count)
        if number == index:
            held.append(unit)
            return ()
        if number == index + 1:
            return (unit, held.pop())
        return (unit,)

    return tamper


class Way:
    """Carry one direction of one connection. ``seen`` has every unit that came, in order."""

    def __init__(self, source: socket.socket, sink: socket.socket, measure: Measure) -> None:
        self._source = source
        self._sink = sink
        self._splitter = Splitter(measure)
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self.seen: list[bytes] = []
        self.tamper: Tamper = honest

    def inject(self, data: bytes) -> None:
        """Send what the attacker likes to the far end of this way."""
        with self._sending, contextlib.suppress(OSError):
            self._sink.sendall(data)

    def wait_seen(self, number: int) -> list[bytes]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.seen) >= number, WAIT_S), "nothing more came"
            return list(self.seen)

    def cut(self) -> None:
        for sock in (self._source, self._sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._source.recv(1 << 18):
                for unit in self._splitter.feed(data):
                    with self._changed:
                        self.seen.append(unit)
                        self._changed.notify_all()
                    try:
                        for part in self.tamper(unit):
                            self.inject(part)
                    except Hang as hang:
                        self.inject(hang.last)
                        self.cut()
                        return
        with contextlib.suppress(OSError):
            self._sink.shutdown(socket.SHUT_WR)


class Middle:
    """Listen in place of ``target``. ``up`` leads to the listener, ``down`` to the dialler."""

    def __init__(
        self,
        target: tuple[str, int],
        measure: Measure,
        *,
        up: dict[int, Tamper] | None = None,
        down: dict[int, Tamper] | None = None,
        targets: dict[int, tuple[str, int]] | None = None,
    ) -> None:
        self._target = target
        self._measure = measure
        self._tampers = (up or {}, down or {})
        self._targets = targets or {}
        self._changed = threading.Condition()
        self._ways: list[tuple[Way, Way]] = []
        self._sockets: list[socket.socket] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        host, port = self._socket.getsockname()[:2]
        self.address: tuple[str, int] = (host, port)
        threading.Thread(target=self._accept, daemon=True).start()

    def up(self, connection: int) -> Way:
        return self._way(connection)[0]

    def down(self, connection: int) -> Way:
        return self._way(connection)[1]

    @property
    def num_connections(self) -> int:
        return len(self._ways)

    def cut(self, connection: int) -> None:
        for way in self._way(connection):
            way.cut()

    def close(self) -> None:
        for sock in (self._socket, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _way(self, connection: int) -> tuple[Way, Way]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._ways) > connection, WAIT_S), "nobody dialled"
            return self._ways[connection]

    def _accept(self) -> None:
        for index in itertools.count():
            try:
                near, _ = self._socket.accept()
                far = socket.create_connection(self._targets.get(index, self._target))
            except OSError:
                return
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets += [near, far]
            ways = (Way(near, far, self._measure), Way(far, near, self._measure))
            for way, tampers in zip(ways, self._tampers, strict=True):
                way.tamper = tampers.get(index, honest)
            with self._changed:
                self._ways.append(ways)
                self._changed.notify_all()
            for way in ways:
                threading.Thread(target=way.run, daemon=True).start()
