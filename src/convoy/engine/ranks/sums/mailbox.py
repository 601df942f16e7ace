"""Parts of an operation from other ranks, checked on arrival and kept for the waiting thread.

Bytes of a rank are hostile. An operation declares beforehand the sender and shape of every part; anything
else is refused. The bytes kept for an operation that has not begun here are bounded. Parts above the bound
wait on their link's receiver thread, which holds the sender back.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from convoy.config.table import MAX_RANKS
from convoy.errors import CollectiveError, StepError
from convoy.transport.link.inbox import weight_of
from convoy.transport.link.link import ReceivedTensor
from convoy.wire.tensor import WireTensor

# Of an operation that has not begun here.
MAX_HELD_BYTES = 512 * 1024
# Operations; only those without a reply let a rank run ahead of another by more than one.
MAX_AHEAD = 16


class PartSlot(NamedTuple):
    """Name a part of an operation by its ``sender``, its kind ``part``, and its maker ``origin``."""

    sender: int
    part: int
    origin: int


class Arrived(NamedTuple):
    """Hold the ``nth`` piece of a slot, from 0 on."""

    slot: PartSlot
    nth: int
    tensor: WireTensor


@dataclass(slots=True)
class ExpectedPart:
    """List the pieces of a slot, in their order of arrival."""

    shapes: Sequence[tuple[int, ...]]
    dtype: str
    num_come: int = 0


def code_of(part: int, origin: int) -> int:
    """Return the boundary field of a piece's frame header."""
    return 256 * part + origin


class PartMailbox:
    """Receive the parts of one operation at a time, each with the next number.

    Any thread may call `put` and `fail`.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._changed = threading.Condition(threading.Lock())
        self._arrived: queue.SimpleQueue[Arrived | None] = queue.SimpleQueue()
        self._expected: Mapping[PartSlot, ExpectedPart] = {}
        self._running = False
        self._num_begun = 0
        self._held: list[tuple[int, ReceivedTensor]] = []
        self.held_bytes = 0
        self._error: CollectiveError | None = None

    @property
    def error(self) -> CollectiveError | None:
        """Return the error that ended the collective, or None."""
        return self._error

    @property
    def number(self) -> int:
        """Return the number of the operation that runs, or ran last; -1 before the first."""
        return self._num_begun - 1

    # Called by the thread that runs operations.

    def begin(self, expected: Mapping[PartSlot, ExpectedPart]) -> int:
        """Begin the next operation, with the parts in ``expected``, and return its number.

        Raises `CollectiveError`.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            number = self._num_begun
            self._num_begun += 1
            self._expected = expected
            self._running = True
            held, self._held, self.held_bytes = self._held, [], 0
            self._changed.notify_all()
            # Parts that came early are checked only now, when the expected shapes are known.
            for sender, received in held:
                try:
                    self._place(sender, received)
                except StepError as error:
                    self._error = CollectiveError(error.message, rank=sender)
                    raise self._error from error
        return number

    def take(self, until_s: float, what: str) -> Arrived:
        """Return the next piece.

        Raises `CollectiveError` if the collective is over. At ``until_s`` it raises one that names a missing
        rank.
        """
        try:
            item = self._arrived.get(timeout=max(0.0, until_s - time.monotonic()))
        except queue.Empty:
            raise self.fail(self._missing(what)) from None
        return self._whole(item)

    def look(self, wait_s: float = 0.0) -> Arrived | None:
        """Return the next piece if it is there or comes within ``wait_s``, else None.

        Raises as `take` if it is over.
        """
        try:
            item = self._arrived.get(timeout=wait_s) if wait_s else self._arrived.get_nowait()
        except queue.Empty:
            return None
        return self._whole(item)

    def _whole(self, item: Arrived | None) -> Arrived:
        if item is None:
            assert self._error is not None, "nothing else ends the queue"
            raise self._error
        return item

    def end(self) -> None:
        """End the operation, because all its parts have come."""
        self._running = False

    # Called by receiver threads, and by the thread that ends it.

    def put(self, sender: int, received: ReceivedTensor, *, waits: bool = True) -> None:
        """Take a piece from ``sender``; with ``waits``, block while it is too early.

        Raises `StepError` for an unexpected piece. Once the collective is over, pieces are dropped.
        """
        number, until_s = received.step, time.monotonic() + self._deadline_s
        with self._changed:
            # Hold a piece that is too early in this thread: its link then fills, and its sender slows down.
            while self._error is None:
                if number < self._num_begun:
                    self._place(sender, received)
                    return
                if number > self._num_begun + MAX_AHEAD:
                    raise StepError(
                        f"rank {sender} is at operation {number}, expected {max(0, self._num_begun - 1)} "
                        f"to {self._num_begun + MAX_AHEAD}"
                    )
                if number == self._num_begun and self._has_room(received):
                    self._held.append((sender, received))
                    self.held_bytes += weight_of(received)
                    return
                if not waits or not self._changed.wait(until_s - time.monotonic()):
                    raise StepError(
                        f"rank {sender} waits in operation {number}, and this one was at "
                        f"{self._num_begun - 1} for {self._deadline_s:g} s"
                    )

    def fail(self, error: CollectiveError) -> CollectiveError:
        """Wake all waiting threads; the first call counts. Return the error that every thread gets."""
        with self._changed:
            if self._error is None:
                self._error = error
                self._held.clear()
                self._arrived.put(None)
                self._changed.notify_all()
            return self._error

    def _has_room(self, received: ReceivedTensor) -> bool:
        # A part without elements still takes an object, so it counts by its weight too.
        return not self._held or self.held_bytes + weight_of(received) <= MAX_HELD_BYTES

    def _place(self, sender: int, received: ReceivedTensor) -> None:
        if received.step != self._num_begun - 1 or not self._running:
            raise StepError(
                f"rank {sender} sent a part of operation {received.step}, which is over: "
                f"this one is at {self._num_begun - 1}"
            )
        slot = PartSlot(sender, *divmod(received.boundary, 256))
        expected = self._expected.get(slot)
        tensor = received.tensor
        if expected is None or expected.num_come == len(expected.shapes):
            raise StepError(f"rank {sender} sent an unexpected or repeated part in {self._where}")
        shape = expected.shapes[expected.num_come]
        if tensor.shape != shape or tensor.dtype != expected.dtype:
            raise StepError(
                f"rank {sender} sent {tensor.dtype} of shape {list(tensor.shape)[:6]} in {self._where}, "
                f"expected {expected.dtype} of {list(shape)}"
            )
        self._arrived.put(Arrived(slot, expected.num_come, tensor))
        expected.num_come += 1

    @property
    def _where(self) -> str:
        return f"operation {self._num_begun - 1}"

    def _missing(self, what: str) -> CollectiveError:
        """Return the error for a missing part; it prefers a rank that did not send its own part."""
        with self._changed:
            slots = [slot for slot, each in self._expected.items() if each.num_come < len(each.shapes)]
        slots.sort(key=lambda slot: (slot.origin != slot.sender, slot.sender))
        rank = slots[0].sender if slots else None
        text = f"rank {rank} sent nothing" if slots else "a rank sent nothing"
        return CollectiveError(
            f"{text} of operation {self.number}, {what}, within {self._deadline_s:g} s", rank=rank
        )


assert code_of(3, MAX_RANKS - 1) < 2**16, "a part and a rank fit the header's field"
