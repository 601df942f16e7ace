"""Carry a tensor in the bench: the same three tasks over a sealed link and over a bare pair of streams.

Each tensor tells the other end its task. Over a link the task takes the field of a hidden state's layer
boundary; over streams it stands in a header of 8 bytes.
"""

from __future__ import annotations

import enum
import queue
import struct
from typing import Protocol

from convoy.errors import ConvoyError, LinkBroken, PeerUnreachable
from convoy.transport.link.link import Link, Received, ReceivedTensor
from convoy.transport.streams.stream import Stream
from convoy.wire.messages.control import FrameType
from convoy.wire.tensor import WireTensor

_HEADER = struct.Struct(">B3xI")
_BUFFER_BYTES = 256 * 1024
_WAIT_S = 30.0


class HopTask(enum.IntEnum):
    """Tell the other end how to treat a tensor."""

    # Send it back.
    RETURN = 0
    # Answer nothing.
    KEEP = 1
    # Answer with a tensor of 4 bytes.
    CONFIRM = 2


class Carrier(Protocol):
    """Carry tensors between the two processes in one way. For use by one thread."""

    def send(self, tensor: WireTensor, ask: HopTask) -> None:
        """Send a tensor. Raises `LinkBroken`."""

    def receive(self) -> tuple[HopTask, memoryview | bytes]:
        """Return the next tensor's task and bytes, valid until the next call. Raises `ConvoyError`."""

    def close(self) -> None:
        """End both directions."""


class LinkCarrier:
    """Carry tensors over a real link as members do: the receiver thread hands each to the waiting thread.

    ``receive`` waits at most ``wait_s``; None means for ever.
    """

    def __init__(self, link: Link, wait_s: float | None = _WAIT_S) -> None:
        self._link = link
        self._wait_s = wait_s
        self._arrived: queue.SimpleQueue[Received | ConvoyError] = queue.SimpleQueue()
        link.start(self._deliver, self._ended, frozenset({FrameType.HIDDEN}))

    @property
    def cipher(self) -> str:
        return self._link.cipher

    def send(self, tensor: WireTensor, ask: HopTask) -> None:
        self._link.send_tensor(tensor, plan_id=0, step=0, boundary=ask)

    def receive(self) -> tuple[HopTask, memoryview | bytes]:
        try:
            item = self._arrived.get(timeout=self._wait_s)
        except queue.Empty:
            raise PeerUnreachable(f"the other process sent nothing for {self._wait_s:g} s") from None
        if isinstance(item, ConvoyError):
            raise item
        if not isinstance(item, ReceivedTensor):
            raise LinkBroken("the other process sent a message, expected a tensor")
        return HopTask(item.boundary), item.tensor.data

    def close(self) -> None:
        self._link.close("the bench is over")

    def _deliver(self, _link: Link, received: Received) -> None:
        self._arrived.put(received)

    def _ended(self, _link: Link, error: ConvoyError) -> None:
        self._arrived.put(error)


class StreamCarrier:
    """Carry tensors over two streams, one per direction as in a link, with blocking calls of one thread.

    This is deliberately as lean as blocking Python gets, so that the overhead of a link does not look smaller
    than it is. A small tensor is one write and one read. A large one is read to its final place, in memory
    that is reused.
    """

    def __init__(self, outgoing: Stream, incoming: Stream) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._view = memoryview(bytearray(_BUFFER_BYTES))
        self._start = 0
        self._end = 0
        self._large = memoryview(b"")

    def send(self, tensor: WireTensor, ask: HopTask) -> None:
        header = _HEADER.pack(ask, tensor.nbytes)
        if tensor.nbytes + _HEADER.size <= _BUFFER_BYTES:
            self._outgoing.send_all(header + tensor.data)
        else:
            self._outgoing.send_all(header)
            self._outgoing.send_all(tensor.data)

    def receive(self) -> tuple[HopTask, memoryview | bytes]:
        self._fill(_HEADER.size)
        number, num_bytes = _HEADER.unpack_from(self._view, self._start)
        self._start += _HEADER.size
        if num_bytes <= _BUFFER_BYTES:
            self._fill(num_bytes)
            data = self._view[self._start : self._start + num_bytes]
            self._start += num_bytes
            return HopTask(number), data
        return HopTask(number), self._rest_of(num_bytes)

    def close(self) -> None:
        for stream in (self._outgoing, self._incoming):
            stream.close()

    def _fill(self, num_bytes: int) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start + num_bytes > len(self._view):
            rest = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, len(rest)
            self._view[: len(rest)] = rest
        while self._end - self._start < num_bytes:
            self._end += self._read(self._view[self._end :])

    def _rest_of(self, num_bytes: int) -> memoryview:
        if len(self._large) < num_bytes:
            self._large = memoryview(bytearray(num_bytes))
        here = min(self._end - self._start, num_bytes)
        self._large[:here] = self._view[self._start : self._start + here]
        self._start += here
        while here < num_bytes:
            here += self._read(self._large[here:num_bytes])
        return self._large[:num_bytes]

    def _read(self, room: memoryview) -> int:
        got = self._incoming.recv_into(room)
        if got == 0:
            raise LinkBroken("the other process closed the connection")
        return got
