"""What other ranks sent of an operation: checked as it comes, kept for the one thread that waits for it.

Bytes of a rank are hostile. An operation says beforehand who sends what in it, shape by shape; anything else
is refused. What is kept of an operation that has not begun here is bounded, and what is over that waits on
its link's receiver thread, which holds the sender back.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from convoy.errors import CollectiveError, StepError
from convoy.transport.link.inbox import weight_of
from convoy.transport.link.link import ReceivedTensor
from convoy.wire.messages.control import MAX_RANKS
from convoy.wire.tensor import WireTensor

MAX_HELD_BYTES = 512 * 1024  # of an operation that has not begun here
MAX_AHEAD = 16  # operations; only those that answer nobody bring a rank more than one before another


class PartSlot(NamedTuple):
    """What ``sender`` hands over: what kind of part of an operation, and which rank made it."""

    sender: int
    part: int
    origin: int


class Arrived(NamedTuple):
    """The ``nth`` piece of a slot, from 0 on."""

    slot: PartSlot
    nth: int
    tensor: WireTensor


@dataclass(slots=True)
class ExpectedPart:
    """The pieces of a slot, in the order in which they come."""

    shapes: Sequence[tuple[int, ...]]
    dtype: str
    num_come: int = 0


def code_of(part: int, origin: int) -> int:
    """A piece's boundary in its frame's header."""
    return 256 * part + origin


class PartMailbox:
    """One operation at a time, each with the next number. Any thread may call `put` and `fail`."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._changed = threading.Condition(threading.Lock())
        self._arrived: queue.SimpleQueue[Arrived | None] = queue.SimpleQueue()
        self._expected: Mapping[PartSlot, ExpectedPart] = {}
        self._running = False
        self._num_begun = 0
        self._held: list[tuple[int, ReceivedTensor]] = []
        self._held_bytes = 0
        self._error: CollectiveError | None = None

    @property
    def error(self) -> CollectiveError | None:
        """Why it is over, or None."""
        return self._error

    @property
    def number(self) -> int:
        """Of the operation that runs, or ran last; -1 before the first."""
        return self._num_begun - 1

    # The thread that runs operations.

    def begin(self, expected: Mapping[PartSlot, ExpectedPart]) -> int:
        """The number of the next operation, in which ``expected`` comes. Raises `CollectiveError`."""
        with self._changed:
            if self._error is not None:
                raise self._error
            number = self._num_begun
            self._num_begun += 1
            self._expected = expected
            self._running = True
            held, self._held, self._held_bytes = self._held, [], 0
            self._changed.notify_all()
            for sender, received in held:
                try:
                    self._place(sender, received)
                except StepError as error:
                    self._error = CollectiveError(error.message, rank=sender)
                    raise self._error from error
        return number

    def take(self, until_s: float, what: str) -> Arrived:
        """The next piece. Raises `CollectiveError` once it is over, or at ``until_s`` with who is missing."""
        try:
            item = self._arrived.get(timeout=max(0.0, until_s - time.monotonic()))
        except queue.Empty:
            raise self.fail(self._missing(what)) from None
        return self._whole(item)

    def look(self, wait_s: float = 0.0) -> Arrived | None:
        """The next piece, if it is there or comes within this time. Raises as `take` once it is over."""
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
        """All of the operation has come."""
        self._running = False

    # Receiver threads, and whoever ends it.

    def put(self, sender: int, received: ReceivedTensor, *, waits: bool = True) -> None:
        """A piece from ``sender``; ``waits`` where it is too early. Raises `StepError` for what is not
        expected.

        Nothing comes of it once the collective is over.
        """
        number, until_s = received.step, time.monotonic() + self._deadline_s
        with self._changed:
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
                    self._held_bytes += weight_of(received)
                    return
                if not waits or not self._changed.wait(until_s - time.monotonic()):
                    raise StepError(
                        f"rank {sender} waits in operation {number}, and this one was at "
                        f"{self._num_begun - 1} for {self._deadline_s:g} s"
                    )

    def fail(self, error: CollectiveError) -> CollectiveError:
        """Wake whoever waits; the first call counts. The error that everybody gets."""
        with self._changed:
            if self._error is None:
                self._error = error
                self._held.clear()
                self._arrived.put(None)
                self._changed.notify_all()
            return self._error

    def _has_room(self, received: ReceivedTensor) -> bool:
        # a part without elements is an object all the same
        return not self._held or self._held_bytes + weight_of(received) <= MAX_HELD_BYTES

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
            raise StepError(f"rank {sender} sent what is not, or not any more, expected in {self._where}")
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
        """Who is waited for: of those whose part is missing, one that hands over its own, if there is one."""
        with self._changed:
            slots = [slot for slot, each in self._expected.items() if each.num_come < len(each.shapes)]
        slots.sort(key=lambda slot: (slot.origin != slot.sender, slot.sender))
        rank = slots[0].sender if slots else None
        text = f"rank {rank} sent nothing" if slots else "a rank sent nothing"
        return CollectiveError(
            f"{text} of operation {self.number}, {what}, within {self._deadline_s:g} s", rank=rank
        )


assert code_of(3, MAX_RANKS - 1) < 2**16, "a part and a rank fit the header's field"
