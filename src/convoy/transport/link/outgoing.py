"""The sending half of a link: a bounded queue, one buffer that frames are sealed into, one writer at a
time.

A send on an idle link seals and writes in the caller's thread: handing a small frame to another thread
costs more than sealing it. As soon as anything waits, everything goes through the queue and the sender
thread, so the order of sends is the order on the wire.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from convoy.crypto.cipher import TAG_BYTES
from convoy.crypto.seal import FrameSealer
from convoy.errors import ConvoyError, LinkBroken, LinkClosed
from convoy.transport.link.key_usage import TLS_RECORD_BYTES, KeyUsage
from convoy.transport.options import LinkOptions
from convoy.transport.streams.stream import Stream
from convoy.wire.codec import encode_message
from convoy.wire.frame import (
    FLAG_LAST,
    HEADER_BYTES,
    RECORD_BYTES,
    check_payload,
    encode_header_into,
    encode_size,
)
from convoy.wire.messages.control import FrameType, Message
from convoy.wire.messages.link import Pong, RosterUpdate
from convoy.wire.tensor import DESCRIPTOR_BYTES, WireTensor, encode_descriptor

_FRAME_BYTES = HEADER_BYTES + RECORD_BYTES + TAG_BYTES
_MAX_PONGS = 16


class OutgoingFrame(NamedTuple):
    """Hold one message (``payload``) or one tensor on its way out.

    The memory behind it must not change until it has left.
    """

    type: FrameType
    plan_id: int
    step: int
    boundary: int = 0
    payload: bytes = b""
    tensor: WireTensor | None = None
    # Set on a SWITCH only: frames after this one take its connection.
    onto: Outgoing | None = None

    # Payloads must not reach logs or error texts, so the text form leaves them out.
    def __repr__(self) -> str:
        return f"OutgoingFrame({self.type.name}, step={self.step}, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        return len(self.payload) if self.tensor is None else self.tensor.nbytes


class Outgoing:
    """Own the sending direction of one stream, and its sealer."""

    def __init__(
        self,
        stream: Stream,
        sealer: FrameSealer,
        cluster: bytes,
        options: LinkOptions,
        on_error: Callable[[ConvoyError], None],
        *,
        on_limit: Callable[[], None] = lambda: None,
    ) -> None:
        self._stream = stream
        self._sealer = sealer
        self._cluster = cluster
        self._options = options
        self._on_error = on_error
        self._key_usage = KeyUsage(options, on_limit)
        self._lock = threading.Lock()
        # Notified only in places where a thread may wait, to keep sends on an idle link cheap.
        self._changed = threading.Condition(self._lock)
        self._queue: deque[OutgoingFrame] = deque()
        self._queued_bytes = 0
        self._busy = False
        self._closing = False
        # True from queueing a SWITCH until it has left.
        self._switching = False
        self._error: ConvoyError | None = None
        self._buffer = bytearray(_FRAME_BYTES)
        self._view = memoryview(self._buffer)
        self._filled = 0
        self._progress_s = time.monotonic()
        self.num_frames = 0
        self.num_bytes = 0

    def send(self, frame: OutgoingFrame) -> None:
        """Send at once if nothing waits, otherwise queue; block while the queue is full.

        Raises `ConvoyError`; then the link has ended, or is being closed.
        """
        with self._lock:
            self._raise_if_over()
            idle = not self._busy and not self._queue
            if idle:
                self._begin()
            elif self._enqueue(frame, None):
                return
        if not idle:
            stalled_s = self._options.stall_timeout_s
            self._fail(LinkBroken(f"the peer took nothing for {stalled_s:g} s"))
        if not idle or not self._work((frame,)):
            self._raise_if_over()

    def post(self, frame: OutgoingFrame, deadline_s: float) -> bool:
        """Queue for the sender thread, so that a blocking write does not hold the caller.

        Return False if the queue was full until the deadline. Raises `ConvoyError` if the link is over.
        """
        with self._changed:
            self._raise_if_over()
            return self._enqueue(frame, deadline_s)

    def post_pong(self, frame: OutgoingFrame) -> None:
        """Queue a PONG without ever waiting.

        Receivers must not wait for senders, or two ends could wait for each other. So the number of
        queued PONGs is limited, and further ones are dropped.
        """
        with self._changed:
            waiting = sum(item.type is Pong.frame.type for item in self._queue)
            if self._error is None and waiting < _MAX_PONGS:
                self._queue.append(frame)
                self._queued_bytes += frame.nbytes
                self._changed.notify_all()

    def post_switch(self, frame: OutgoingFrame) -> None:
        """Queue the last frame of this connection, regardless of the queue's limit, once the previous
        SWITCH has left.

        An honest dialler switches again only after it has read our SWITCH, so normally there is no wait.
        A dialler that does not read must not make connections pile up here. Raises `ConvoyError` if the
        link is over.
        """
        with self._changed:
            stalled_s = self._options.stall_timeout_s
            free = self._changed.wait_for(lambda: not self._switching or self._error is not None, stalled_s)
            self._raise_if_over()
            if not free:
                raise LinkBroken(f"the peer did not take a SWITCH for {stalled_s:g} s, and sent another")
            self._switching = True
            self._queue.append(frame)
            self._queued_bytes += frame.nbytes
            self._changed.notify_all()

    def post_roster(self, frame: OutgoingFrame) -> None:
        """Queue a roster regardless of the queue's limit, in place of an older one that waits.

        Do nothing if the link is over.
        """
        with self._changed:
            if self._error is not None or self._closing:
                return
            kept = [item for item in self._queue if item.type is not RosterUpdate.frame.type]
            self._queue = deque([*kept, frame])
            self._queued_bytes = sum(item.nbytes for item in self._queue)
            self._changed.notify_all()

    @property
    def sent_s(self) -> float:
        """Return when the last write began or ended (``time.monotonic``)."""
        return self._progress_s

    def run(self) -> None:
        """Send queued frames until the link ends. This is the sender thread."""
        while True:
            with self._changed:
                while self._error is None and (self._busy or not self._queue):
                    self._changed.wait()
                if self._error is not None:
                    return
                batch = tuple(self._queue)
                self._queue.clear()
                self._queued_bytes = 0
                self._begin()
                self._changed.notify_all()
            self._work(batch)

    def finish(self, last: OutgoingFrame, timeout_s: float, *, drop: bool = False) -> None:
        """Send the queue and then ``last`` within ``timeout_s``, and refuse further sends.

        ``drop`` discards the queue instead of sending it. Never raises.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            self._closing = True
            if drop:
                self._queue.clear()
                self._queued_bytes = 0
            while self._error is None and (self._busy or self._queue):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return
                self._changed.wait(left_s)
            if self._error is not None:
                return
            self._begin()
        self._stream.set_deadline(deadline_s)
        self._work((last,))

    def end(self, error: ConvoyError) -> None:
        """Make every waiting and later send raise because of ``error``. Only the first call has an effect."""
        with self._changed:
            if self._error is None:
                self._error = error
                _end_unused(self._queue, error)
                self._queue.clear()
                if not self._busy:
                    self._sealer.wipe()
            self._changed.notify_all()

    def _begin(self) -> None:
        """Make the calling thread the writer."""
        self._busy = True
        self._progress_s = time.monotonic()

    def _enqueue(self, frame: OutgoingFrame, deadline_s: float | None) -> bool:
        """Queue a frame. Return False if there is no room by the deadline.

        Without a deadline, return False once the peer has taken nothing for the stall timeout. A queue
        that stays full is no stall as long as the writes before it complete.
        """
        began_s = time.monotonic()
        while self._full(frame):
            stalled_s = max(began_s, self._progress_s) + self._options.stall_timeout_s
            left_s = (stalled_s if deadline_s is None else deadline_s) - time.monotonic()
            if left_s <= 0:
                return False
            self._changed.wait(left_s)
            self._raise_if_over()
        self._queue.append(frame)
        self._queued_bytes += frame.nbytes
        self._changed.notify_all()
        return True

    def _full(self, frame: OutgoingFrame) -> bool:
        options = self._options
        too_many = len(self._queue) >= options.max_queued_frames
        return too_many or (
            bool(self._queue) and self._queued_bytes + frame.nbytes > options.max_queued_bytes
        )

    def _raise_if_over(self) -> None:
        if self._error is not None:
            kind = LinkClosed if isinstance(self._error, LinkClosed) else LinkBroken
            raise kind(self._error.message, hint=self._error.hint) from self._error
        if self._closing:
            raise LinkClosed("the link is being closed")

    # Only the one thread that set `_busy` calls the methods below.

    def _work(self, frames: tuple[OutgoingFrame, ...]) -> bool:
        """Seal and write ``frames``. Return True if all of them left; later failures concern later calls."""
        try:
            for frame in frames:
                self._pack(frame)
                if frame.onto is not None:
                    self._move(frame.onto)
            self._flush()
            return True
        except ConvoyError as error:
            self._fail(error)
            return False
        except BaseException as bug:
            # Half a frame may be out, and the counter has moved: nothing can follow on this link.
            self._fail(LinkBroken(f"this side failed while it sent: {type(bug).__name__}"))
            raise
        finally:
            with self._lock:
                self._busy = False
                # `end` leaves the sealer to the thread that writes, which wipes it here.
                if self._error is not None:
                    self._sealer.wipe()
                    _end_unused(frames, self._error)
                if self._queue or self._closing:
                    self._changed.notify_all()

    def _fail(self, error: ConvoyError) -> None:
        self.end(error)
        self._on_error(error)

    def _move(self, fresh: Outgoing) -> None:
        """Write the packed frames, then continue on the connection of ``fresh``, which has no other user."""
        self._flush()
        old, sealer = self._stream, self._sealer
        # The lock keeps `end` out: it wipes the current sealer, and nothing may be sealed after it.
        with self._changed:
            self._switching = False
            self._changed.notify_all()
            self._stream, self._sealer = fresh._stream, fresh._sealer
            self.num_frames += fresh.num_frames
            self.num_bytes += fresh.num_bytes
            self._key_usage.num_records = fresh._key_usage.num_records
        sealer.wipe()
        # Bytes that the old connection still has to send, SWITCH last, leave before it ends.
        old.close()

    def _pack(self, frame: OutgoingFrame) -> None:
        if frame.tensor is None:
            if len(frame.payload) <= RECORD_BYTES:
                self._frame(frame, frame.payload, 0, FLAG_LAST)
            else:
                self._frame(frame, encode_size(len(frame.payload)), 0, 0)
                self._records(frame, memoryview(frame.payload))
            return
        descriptor = encode_descriptor(frame.tensor)
        size = frame.tensor.nbytes
        if DESCRIPTOR_BYTES + size <= RECORD_BYTES:
            self._frame(frame, b"".join((descriptor, frame.tensor.data)), 0, FLAG_LAST)
            return
        # A large tensor's first record is the descriptor alone, so that the receiver can open the rest into
        # the tensor's final memory.
        self._frame(frame, descriptor, 0, 0)
        self._records(frame, memoryview(frame.tensor.data).cast("B"))

    def _records(self, frame: OutgoingFrame, data: memoryview) -> None:
        for record, start in enumerate(range(0, len(data), RECORD_BYTES), start=1):
            end = start + RECORD_BYTES
            self._frame(frame, data[start:end], record, FLAG_LAST if end >= len(data) else 0)

    def _frame(self, frame: OutgoingFrame, payload: bytes | memoryview, record: int, flags: int) -> None:
        length = len(payload) + TAG_BYTES
        size = HEADER_BYTES + length
        if self._filled + size > len(self._buffer):
            self._flush()
        start, view = self._filled, self._view
        # The header is sealed with the payload as AAD, sequence number included.
        encode_header_into(
            view,
            start,
            (
                frame.type,
                flags,
                frame.boundary,
                length,
                self._cluster,
                frame.plan_id,
                frame.step,
                self._sealer.sequence,
                0,
                record,
            ),
        )
        body = start + HEADER_BYTES
        self._sealer.seal_into(view[start:body], payload, view[body : start + size])
        self.num_frames += 1
        self.num_bytes += length
        self._filled += size

    def _flush(self) -> None:
        if self._filled:
            num_bytes, self._filled = self._filled, 0
            self._stream.send_all(self._view[:num_bytes])
            self._progress_s = time.monotonic()
            # Each write ends its last TLS record, so a partial record counts as one.
            self._key_usage.add(-(-num_bytes // TLS_RECORD_BYTES))


def _end_unused(frames: Iterable[OutgoingFrame], error: ConvoyError) -> None:
    """Wipe the keys of connections that were to follow these frames."""
    for frame in frames:
        if frame.onto is not None:
            frame.onto.end(error)


def message_frame(message: Message, plan_id: int = 0, step: int = 0) -> OutgoingFrame:
    """Return a message as an `OutgoingFrame`.

    Raises `FrameTooLong` in the caller's own thread, before anything is sealed.
    """
    kind, payload = message.frame.type, encode_message(message)
    check_payload(kind, len(payload))
    return OutgoingFrame(kind, plan_id, step, payload=payload)
