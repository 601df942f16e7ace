"""The receiving half of a link: one buffer, frames opened in order, tensors opened into their final
memory.

Every limit is checked on the header, before anything is allocated. No field of a frame is believed before
the frame has opened. A message or tensor longer than a record announces its size in a frame of its own,
and its memory is taken from a budget once that frame has opened.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

import numpy as np

from convoy.crypto.cipher import TAG_BYTES
from convoy.crypto.seal import FrameOpener
from convoy.errors import FrameError, LinkBroken, SealError
from convoy.transport.link.key_usage import KeyUsage
from convoy.transport.options import LinkOptions
from convoy.transport.streams.stream import Stream
from convoy.wire.codec import decode_message
from convoy.wire.frame import (
    HANDSHAKE_MAGIC,
    HANDSHAKE_PREAMBLE_BYTES,
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    RECORD_BYTES,
    TENSOR_TYPES,
    FrameHeader,
    decode_header,
    decode_preamble,
    decode_size,
    frames_from,
)
from convoy.wire.messages.control import FrameType, Message, Sender
from convoy.wire.tensor import DESCRIPTOR_BYTES, WireTensor, decode_descriptor

_BUFFER_BYTES = 2 * (HEADER_BYTES + RECORD_BYTES + TAG_BYTES)
# The frames that a link handles itself, for every owner.
LINK_TYPES = frames_from(Sender.LINK)


class ReceivedMessage(NamedTuple):
    """Hold a message with the plan id and step of its header."""

    plan_id: int
    step: int
    message: Message


class ReceivedTensor(NamedTuple):
    """Hold a hidden state for layer ``boundary``, or K/V from that layer on. The receiver owns its memory."""

    plan_id: int
    step: int
    boundary: int
    tensor: WireTensor
    kind: FrameType = FrameType.HIDDEN
    # When it was opened here (``time.monotonic``).
    at_s: float = 0.0


Received = ReceivedMessage | ReceivedTensor
ReadEnd = Callable[[bytes], NoReturn]


class ReceiveDeadline:
    """Track how long this end has waited for the peer.

    The receiver writes it, and the link's watch judges it.

    Each attribute is set in one assignment, so no lock is needed. A read slightly early or late only
    shifts the verdict by a moment.
    """

    def __init__(self) -> None:
        # Since when the receiver waits for the peer; None while it is busy here and does not wait.
        self.since_s: float | None = None
        # Since when the receiver is busy here and does not read; None while it waits.
        self.busy_s: float | None = None
        self.over = False
        self._whole: tuple[float, float, str] | None = None

    def begin(self) -> None:
        """Start the wait anew: bytes came, or the receiver is no longer busy here."""
        self.since_s = time.monotonic()
        self.busy_s = None

    def suspend(self) -> None:
        """Stop the wait: the receiver is busy here."""
        self.since_s = None
        self.busy_s = time.monotonic()

    def whole_by(self, within_s: float | None, what: str = "") -> None:
        """Require ``what`` to be complete within this time, however its bytes are spread over it; None
        ends that.
        """
        self._whole = None if within_s is None else (time.monotonic() + within_s, within_s, what)

    def verdict(self, now_s: float, gone_after_s: float) -> str | None:
        """Return the peer's fault as text, or None if it is in time."""
        whole, since_s = self._whole, self.since_s
        if whole is not None and now_s > whole[0]:
            return f"{whole[2]} did not come whole within {whole[1]:.3g} s"
        if since_s is not None and now_s - since_s > gone_after_s:
            return f"nothing came for {gone_after_s:.3g} s"
        return None


class Incoming:
    """Own the receiving direction of one stream, and its opener. For one thread.

    ``read_end`` raises the error for the payload of a HANDSHAKE_END that comes instead of the first
    frame.
    """

    def __init__(
        self,
        stream: Stream,
        opener: FrameOpener,
        cluster: bytes,
        options: LinkOptions,
        read_end: ReadEnd,
        *,
        on_limit: Callable[[], None] = lambda: None,
    ) -> None:
        self._stream = stream
        self._opener = opener
        self._cluster = cluster
        self._options = options
        self._read_end = read_end
        self._view = memoryview(bytearray(_BUFFER_BYTES))
        self._start = 0
        self._end = 0
        self.num_frames = 0
        self.num_bytes = 0
        self.deadline = ReceiveDeadline()
        self._key_usage = KeyUsage(options, on_limit)

    def receive(self, allowed: frozenset[FrameType]) -> Received:
        """Return the next message or complete tensor.

        Raises `LinkBroken`, `FrameError` or `SealError`, and for the first frame also `HandshakeError` or
        `Incompatible`. All of them end the link.
        """
        self.deadline.begin()
        header = self._next_header(allowed)
        if header.type in TENSOR_TYPES:
            tensor = self._tensor(header)
            return ReceivedTensor(
                header.plan_id, header.step, header.boundary, tensor, header.type, time.monotonic()
            )
        # Without the last mark it is the first frame of a message in records, so its type must allow those.
        is_whole = header.last or MAX_PAYLOAD_BYTES[header.type] > RECORD_BYTES
        if not is_whole or header.record != 0 or header.boundary != 0:
            raise FrameError(f"a {header.type.name} has flags, boundary or record of a tensor")
        payload = _memory(header.length - TAG_BYTES)
        self._open(header, payload)
        message = decode_message(header.type, payload) if header.last else self._long(header, payload)
        return ReceivedMessage(header.plan_id, header.step, message)

    @property
    def stream(self) -> Stream:
        """Return the connection that this half reads."""
        return self._stream

    @property
    def has_more(self) -> bool:
        """Return whether the buffer holds received bytes that `receive` has not used."""
        return self._start != self._end

    def retire(self) -> None:
        """Close this connection after SWITCH, its last frame. Raises `FrameError` if bytes follow."""
        if self._start != self._end:
            raise FrameError(f"{self._end - self._start} bytes follow SWITCH, which ends its connection")
        self._stream.close()
        self.wipe()

    def succeed(self, before: Incoming, on_limit: Callable[[], None]) -> None:
        """Carry on the counts of the connection that this one replaces, and report the limit to the link
        through ``on_limit``.
        """
        self.num_frames += before.num_frames
        self.num_bytes += before.num_bytes
        self._key_usage.on_limit = on_limit

    def wipe(self) -> None:
        """Wipe the opening key. Call it on the receiving thread, or once no thread receives any more."""
        self._opener.wipe()

    def discard_until_end(self) -> None:
        """Read and drop bytes until the other end closes.

        Closing with unread bytes would send a reset, and the other end could lose our goodbye to it.
        """
        while self._stream.recv_into(self._view) > 0:
            pass

    def _tensor(self, header: FrameHeader) -> WireTensor:
        if header.record != 0:
            raise FrameError(f"a tensor begins with record {header.record}, expected 0")
        first = _memory(header.length - TAG_BYTES)
        self._open(header, first)
        dtype, shape, nbytes = decode_descriptor(first, max_tensor_bytes(header.type, self._options))
        single = DESCRIPTOR_BYTES + nbytes <= RECORD_BYTES
        # A sender divides a tensor in one way only, so the receiver accepts no other division.
        if header.last != single or len(first) != DESCRIPTOR_BYTES + (nbytes if single else 0):
            raise FrameError(f"the first record of a tensor of {nbytes} bytes has {len(first)} bytes")
        if single:
            return WireTensor(dtype, shape, first[DESCRIPTOR_BYTES:])
        what = f"a tensor of {nbytes} bytes"
        with self._taken(nbytes, what):
            return WireTensor(dtype, shape, self._records(header, nbytes, what))

    def _long(self, first: FrameHeader, payload: memoryview) -> Message:
        """Read a message longer than one record. ``payload`` is the payload of its first frame."""
        nbytes = decode_size(first.type, payload)
        what = f"a {first.type.name} of {nbytes} bytes"
        # The message exists twice for a moment: as received bytes, and as the decoded object.
        with self._taken(2 * nbytes, what):
            return decode_message(first.type, self._records(first, nbytes, what))

    def _records(self, first: FrameHeader, nbytes: int, what: str) -> memoryview:
        options, deadline = self._options, self.deadline
        try:
            deadline.whole_by(options.stall_timeout_s + nbytes / options.floor_bytes_per_s, what)
            data = _memory(nbytes)
            for record, start in enumerate(range(0, nbytes, RECORD_BYTES), start=1):
                end = min(start + RECORD_BYTES, nbytes)
                self._record(first, record, data[start:end], last=end == nbytes)
                deadline.begin()
            return data
        finally:
            deadline.whole_by(None)

    @contextmanager
    def _taken(self, nbytes: int, what: str) -> Iterator[None]:
        """Count ``nbytes`` in the memory budget until ``what`` is complete."""
        budget, deadline = self._options.memory_budget, self.deadline
        deadline.suspend()
        # The sender gives up after the whole stall timeout. Half of it lets this end report the cause first.
        if not budget.take(nbytes, self._options.stall_timeout_s / 2, lambda: deadline.over):
            raise LinkBroken(
                f"no memory for {what}: {budget.taken_bytes} of {budget.max_bytes} bytes are taken by "
                "incomplete messages and tensors"
            )
        deadline.begin()
        try:
            yield
        finally:
            budget.give(nbytes)

    def _record(self, first: FrameHeader, record: int, out: memoryview, *, last: bool) -> None:
        header = self._next_header(frozenset({first.type}))
        same = (header.boundary, header.plan_id, header.step) == (
            first.boundary,
            first.plan_id,
            first.step,
        )
        if (
            not same
            or header.record != record
            or header.last != last
            or header.length != len(out) + TAG_BYTES
        ):
            raise FrameError(
                f"record {header.record} of a {_noun(first.type)} does not continue it, expected {record}"
            )
        self._open(header, out)

    def _next_header(self, allowed: frozenset[FrameType]) -> FrameHeader:
        if self._end - self._start < HEADER_BYTES:
            self._fill(HEADER_BYTES)
        if self.num_frames == 0:
            self._raise_if_refused()
        header = decode_header(self._view, self._start)
        if header.type not in allowed:
            raise FrameError(f"the peer sent {header.type.name}, which it may not send here")
        if header.cluster != self._cluster or header.tensor != 0:
            raise SealError(f"frame {header.sequence} is of another cluster, or of an unknown tensor")
        return header

    def _raise_if_refused(self) -> None:
        """Raise the listener's refusal if END came in place of the first sealed frame.

        The dialling end sends M3 and cannot tell whether the listener accepts it: a listener that refuses
        M3 answers with END. No sealed frame begins with the magic, and END is longer than a header, so
        enough bytes were read.
        """
        if self._view[self._start : self._start + len(HANDSHAKE_MAGIC)] != HANDSHAKE_MAGIC:
            return
        kind, length = decode_preamble(self._view[self._start : self._start + HANDSHAKE_PREAMBLE_BYTES])
        if kind is not FrameType.HANDSHAKE_END:
            raise FrameError(f"the peer sent {kind.name} after the handshake")
        self._fill(HANDSHAKE_PREAMBLE_BYTES + length)
        start = self._start + HANDSHAKE_PREAMBLE_BYTES
        self._read_end(bytes(self._view[start : start + length]))

    def _open(self, header: FrameHeader, out: memoryview) -> None:
        size = HEADER_BYTES + header.length
        self._fill(size)
        body = self._start + HEADER_BYTES
        end = self._start + size
        self._opener.open_into(header.sequence, self._view[self._start : body], self._view[body:end], out)
        self.num_frames += 1
        self.num_bytes += header.length
        self._start = end
        # With nothing left in the buffer, the next read can use all of it.
        if self._start == self._end:
            self._start = self._end = 0

    def _fill(self, num_bytes: int) -> None:
        """Read until ``num_bytes`` lie contiguously from ``_start`` on. No frame is longer than the
        buffer.

        Raises `LinkBroken` if the other end closes first.
        """
        if self._end - self._start >= num_bytes:
            return
        if self._start + num_bytes > len(self._view):
            self._make_room()
        while self._end - self._start < num_bytes:
            got = self._stream.recv_into(self._view[self._end :])
            if got == 0:
                where = "inside a frame" if self._end > self._start else "without saying goodbye"
                raise LinkBroken(f"the other end closed the link {where}")
            self._end += got
            # One call returns bytes of at most one TLS record, so this count is never too low.
            self._key_usage.add(1)

    def _make_room(self) -> None:
        rest = bytes(self._view[self._start : self._end])
        self._start, self._end = 0, len(rest)
        self._view[: len(rest)] = rest


def max_tensor_bytes(kind: FrameType, options: LinkOptions) -> int:
    """Return the largest tensor of a frame type, in bytes.

    Parts of sums come in pieces of a record, and few are kept.
    """
    return RECORD_BYTES - DESCRIPTOR_BYTES if kind is FrameType.PARTIAL else options.max_tensor_bytes


def _noun(kind: FrameType) -> str:
    return "tensor" if kind in TENSOR_TYPES else kind.name


def _memory(num_bytes: int) -> memoryview:
    # Not a bytearray: that would be zeroed first, which costs as much as opening into it.
    return np.empty(num_bytes, dtype=np.uint8).data
