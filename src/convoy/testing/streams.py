"""Streams inside one process, with the faults of a real network on demand. They ship for use in other
tests.

A fault names a write by its index: a link makes one write per frame as long as it is idle between them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from convoy.errors import LinkBroken
from convoy.transport.streams.stream import Stream

_CAPACITY_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Drop:
    """Lose write ``at``: it never arrives."""

    at: int


@dataclass(frozen=True, slots=True)
class FlipBit:
    """Flip bit ``bit`` of write ``at``. A negative bit counts from the end."""

    at: int
    bit: int


@dataclass(frozen=True, slots=True)
class Cut:
    """End the stream after the first ``keep_bytes`` of write ``at``."""

    at: int
    keep_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Reorder:
    """Deliver write ``at`` after the one that follows it."""

    at: int


@dataclass(frozen=True, slots=True)
class Repeat:
    """Deliver write ``at`` twice."""

    at: int


@dataclass(frozen=True, slots=True)
class Stall:
    """Deliver nothing from write ``at`` on until ``release`` is set."""

    at: int
    release: threading.Event = field(default_factory=threading.Event)


Fault = Drop | FlipBit | Cut | Reorder | Repeat | Stall


class _Pipe:
    """Carry one direction: a bounded buffer between a writer and a reader."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self._changed = threading.Condition()
        self._chunks: deque[memoryview] = deque()
        self._num_bytes = 0
        self._ended = False
        self._held: bytes | None = None
        self._index = 0
        self._faults = {fault.at: fault for fault in faults}

    def write(self, data: bytes, deadline_s: float | None) -> None:
        fault = self._faults.get(self._index)
        self._index += 1
        match fault:
            case Drop():
                return
            case FlipBit(bit=bit):
                self._put(_flip(data, bit), deadline_s)
            case Cut(keep_bytes=keep):
                self._put(data[:keep], deadline_s)
                self.end()
            case Reorder():
                self._held = data
            case Repeat():
                self._put(data + data, deadline_s)
            case Stall(release=release):
                self._wait_for(release, deadline_s)
                self._put(data, deadline_s)
            case None:
                held, self._held = self._held, None
                self._put(data if held is None else data + held, deadline_s)

    def read_into(self, buffer: memoryview, deadline_s: float | None) -> int:
        with self._changed:
            while not self._chunks and not self._ended:
                self._wait(deadline_s, "nothing came before the deadline")
            if not self._chunks:
                return 0
            filled = 0
            while self._chunks and filled < len(buffer):
                chunk = self._chunks.popleft()
                size = min(len(chunk), len(buffer) - filled)
                buffer[filled : filled + size] = chunk[:size]
                filled += size
                if size < len(chunk):
                    self._chunks.appendleft(chunk[size:])
            self._num_bytes -= filled
            self._changed.notify_all()
            return filled

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _put(self, data: bytes, deadline_s: float | None) -> None:
        with self._changed:
            while self._num_bytes and self._num_bytes + len(data) > _CAPACITY_BYTES and not self._ended:
                self._wait(deadline_s, "the other end took nothing before the deadline")
            if self._ended:
                raise LinkBroken("the other end closed the stream")
            if data:
                self._chunks.append(memoryview(data))
                self._num_bytes += len(data)
            self._changed.notify_all()

    def _wait(self, deadline_s: float | None, why: str) -> None:
        left = None if deadline_s is None else deadline_s - time.monotonic()
        if left is not None and left <= 0:
            raise LinkBroken(why)
        self._changed.wait(left)

    def _wait_for(self, release: threading.Event, deadline_s: float | None) -> None:
        while not release.wait(0.02):
            if self._ended:
                raise LinkBroken("the other end closed the stream")
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise LinkBroken("the other end took nothing before the deadline")


class MemoryStream:
    """Represent one end of a pair. Without a deadline its sends wait for ever; a test ends its own stalls."""

    def __init__(self, outgoing: _Pipe, incoming: _Pipe) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._deadline_s: float | None = None

    def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self._outgoing.write(bytes(data), self._deadline_s)

    def recv_into(self, buffer: memoryview) -> int:
        return self._incoming.read_into(buffer, self._deadline_s)

    def set_deadline(self, at_s: float | None) -> None:
        self._deadline_s = at_s

    def close(self) -> None:
        self._outgoing.end()
        self._incoming.end()


def memory_stream_pair(
    faults: Iterable[Fault] = (), other_faults: Iterable[Fault] = ()
) -> tuple[MemoryStream, MemoryStream]:
    """Return two ends of one stream.

    ``faults`` apply to the first end's writes, ``other_faults`` to the second's.
    """
    there, back = _Pipe(faults), _Pipe(other_faults)
    return MemoryStream(there, back), MemoryStream(back, there)


class RecordedStream:
    """Copy every byte that is sent, which shows the bytes between the two layers of a link."""

    def __init__(self, stream: Stream, sent: bytearray) -> None:
        self._stream = stream
        self._sent = sent

    def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self._sent += data
        self._stream.send_all(data)

    def recv_into(self, buffer: memoryview) -> int:
        return self._stream.recv_into(buffer)

    def set_deadline(self, at_s: float | None) -> None:
        self._stream.set_deadline(at_s)

    def close(self) -> None:
        self._stream.close()


def _flip(data: bytes, bit: int) -> bytes:
    position = bit % (8 * len(data))
    changed = bytearray(data)
    changed[position // 8] ^= 1 << (position % 8)
    return bytes(changed)
