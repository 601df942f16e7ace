"""Sum over ranks with devices that reach each other's memory: one kernel, in which ranks wait for each other.

A rank writes its part into a mailbox on every other device. Each word lies beside the number of the
operation, so that data and flag arrive in one store (as in NCCL's low-latency protocol). The rank then
adds all parts in the order of ranks, in float32. The host takes no part, so a captured decode can contain
sums.

A mailbox has two slots that alternate. A rank that begins operation n+2 has seen that the others began
n+1, so they were done with n. Steps that are not captured meet on the host before each operation.
Otherwise a waiting kernel could meet one that cannot start, because its thread waits for memory, which
needs the waiting device.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import triton.language as tl

from convoy.errors import CollectiveError, ConvoyError, PlanError
from convoy.model.backends.cuda.kernels.language import kernel, kernel_of_any

# Words of a mailbox for each rank and slot. Longer sums are made in pieces.
_ROOM = 1 << 20
# Words of one program.
_BLOCK = 512
# How often a kernel looks into a mailbox before it gives up: tens of seconds. The sum is then NaN, see
# `DeviceRanks.check_sums`.
_MAX_POLLS = 1 << 24

# A part, and the event after which it is complete.
Gathered = tuple[torch.Tensor, torch.cuda.Event]


class DeviceRanks:
    """Hold the state that ranks on ``devices`` share, one thread for each rank.

    ``ends`` has one `DeviceSums` for each rank. Raises PlanError where devices do not reach each other's
    memory.
    """

    def __init__(self, devices: Sequence[torch.device], deadline_s: float = 60.0) -> None:
        self.deadline_s = deadline_s
        self.error: CollectiveError | None = None
        # One rank captures at a time, because all threads share the libraries' memory.
        self.capturing = threading.Lock()
        self._meeting = threading.Barrier(len(devices))
        self._lock = threading.Lock()
        check_peers(devices)
        _open_peers(devices)
        size = 2 * len(devices) * _ROOM
        with torch.inference_mode(False):
            mailboxes = [torch.zeros(size, dtype=torch.int64, device=device) for device in devices]
            self.ends = [DeviceSums(self, rank, device, mailboxes) for rank, device in enumerate(devices)]
        for device in devices:
            torch.cuda.synchronize(device)

    def abort(self, error: ConvoyError) -> CollectiveError:
        """End the sums of all ranks, so that every rank waiting on the host raises.

        The first call's error counts. Returns the error that all ranks get.
        """
        with self._lock:
            if self.error is None:
                if not isinstance(error, CollectiveError):
                    error = CollectiveError(error.message, hint=error.hint, public=error.public)
                self.error = error
        self._meeting.abort()
        for end in self.ends:
            end.parts.put(None)
        return self.error

    def check_sums(self) -> None:
        """Raise CollectiveError, for all ranks from here on, where a kernel gave up.

        Waits for the devices.
        """
        if any(end.gave_up for end in self.ends):
            raise self.abort(CollectiveError("a rank did not come to a sum on its device"))

    def meet(self) -> None:
        """Wait for all ranks. Raise CollectiveError where one does not arrive within the deadline."""
        try:
            self._meeting.wait(self.deadline_s)
        except threading.BrokenBarrierError:
            late = CollectiveError(f"a rank did not come to a sum within {self.deadline_s:g} s")
            raise self.abort(late) from None


class DeviceSums:
    """Sum for one rank, on one thread. This class implements `Collective`."""

    def __init__(
        self, ranks: DeviceRanks, rank: int, device: torch.device, mailboxes: Sequence[torch.Tensor]
    ) -> None:
        self.rank = rank
        self.world_size = len(mailboxes)
        # Parts for rank 0's gathers.
        self.parts: queue.SimpleQueue[Gathered | None] = queue.SimpleQueue()
        self._ranks = ranks
        # Kept alive here: the table holds their addresses only.
        self._mailboxes = tuple(mailboxes)
        self._table = torch.tensor([box.data_ptr() for box in mailboxes], device=device)
        # Two numbers. First the operations so far: those of the running step are counted on the host and
        # added at its end. Second a flag that a kernel here gave up, after which later kernels do not wait.
        self._count = torch.tensor([1, 0], dtype=torch.int32, device=device)
        self._begun = 0
        self.leaving = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def gave_up(self) -> bool:
        """Return whether a kernel here waited in vain; no later kernel waits since. Waits for the device."""
        return bool(self._count[1].item())

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, in new memory. Raises CollectiveError."""
        x = x.contiguous()
        return self.add(x, torch.empty_like(x))

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """Return all ranks' parts on rank 0, on its device. Raises CollectiveError.

        Other ranks return None, and do not wait for rank 0.
        """
        if self.rank:
            done = torch.cuda.current_stream(x.device).record_event()
            self.parts.put((x, done))
            return None
        return [x, *(self._take(end, x.device) for end in self._ranks.ends[1:])]

    def add(self, part: torch.Tensor, out: torch.Tensor, *, adds: bool = False) -> torch.Tensor:
        """Write the sum of all ranks' ``part`` (float32 or bfloat16) into ``out``. ``adds`` adds it there."""
        flat, into = part.contiguous().view(-1), out.view(-1)
        # Two bfloat16 share one word of the mailbox, which halves the traffic.
        packed = part.dtype == torch.bfloat16 == out.dtype and part.numel() % 2 == 0
        if packed:
            flat, into = flat.view(torch.int32), into.view(torch.int32)
        for begin in range(0, flat.numel(), _ROOM):
            self._one(flat[begin : begin + _ROOM], into[begin : begin + _ROOM], packed=packed, adds=adds)
        return out

    def finish(self) -> None:
        """End a step, so that later operations get higher numbers, also where a captured step runs again."""
        if self._begun:
            # Added on the device, because a captured graph bakes host numbers in.
            self._count[:1].add_(self._begun)
            self._begun = 0

    @contextmanager
    def captures(self) -> Iterator[None]:
        """Let one rank capture at a time, after all ranks have run the operations of the capture."""
        self._ranks.meet()
        with self._ranks.capturing:
            yield
        self._ranks.meet()

    def meet(self) -> None:
        """Wait for the other ranks before a captured step runs. Raises CollectiveError."""
        self._ranks.meet()

    def _one(self, words: torch.Tensor, out: torch.Tensor, *, packed: bool, adds: bool) -> None:
        size = words.numel()

        def launch(programs: int) -> None:
            sum_kernel[programs,](
                out, words, self._table, self._count, self._begun, size, ROOM=_ROOM, RANK=self.rank,
                WORLD=self.world_size, BLOCK=_BLOCK, PACKED=packed, ADDS=adds, MAX_POLLS=_MAX_POLLS,
                num_warps=4,
            )  # fmt: skip

        if not torch.cuda.is_current_stream_capturing():
            # An empty grid only compiles and loads the kernel. That may need the device, so it happens before
            # the ranks meet: afterwards another rank's kernel may be waiting for this one.
            launch(0)
            self._ranks.meet()
        launch(-(-size // _BLOCK))
        self._begun += 1

    def _take(self, end: DeviceSums, device: torch.device) -> torch.Tensor:
        """Return another rank's part for the current stream of ``device``, copied beside other work."""
        try:
            found = end.parts.get(timeout=self._ranks.deadline_s)
        except queue.Empty:
            late = CollectiveError(f"rank {end.rank} did not come to a gather", rank=end.rank)
            raise self._ranks.abort(late) from None
        if found is None:
            raise self._ranks.error or CollectiveError("the group is over")
        part, done = found
        with torch.cuda.stream(end.leaving):
            end.leaving.wait_event(done)
            there = part.to(device, non_blocking=True)
        part.record_stream(end.leaving)
        return there


def check_peers(devices: Sequence[torch.device]) -> None:
    """Raise PlanError where one of ``devices`` does not reach another's memory."""
    for one in devices:
        for other in devices:
            if one != other and not torch.cuda.can_device_access_peer(one, other):
                raise PlanError(
                    f"{one} does not reach the memory of {other}, so they cannot share layers",
                    hint="hold whole layers on each device: " + ",".join(map(str, devices)),
                )


def _open_peers(devices: Sequence[torch.device]) -> None:
    """Make one copy between each two devices: torch enables their peer access with the first copy."""
    for one in devices:
        for other in devices:
            if one != other:
                torch.zeros(1, device=one).copy_(torch.ones(1, device=other))


# fmt: off


@kernel_of_any("begun", "size")
def sum_kernel(out: tl.tensor, words: tl.tensor, table: tl.tensor, count: tl.tensor, begun: tl.tensor,
               size: tl.tensor, ROOM: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
               BLOCK: tl.constexpr, PACKED: tl.constexpr, ADDS: tl.constexpr,
               MAX_POLLS: tl.constexpr) -> None:
    """Sum over ranks. Grid (size / BLOCK,). Words are float32, or PACKED: two bfloat16 in an int32."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = at < size
    number = tl.load(count) + begun
    slot = (number & 1) * WORLD
    stamp = number.to(tl.int64) << 32
    own = tl.load(words + at, mask=known, other=0)
    if not PACKED:
        own = own.to(tl.float32).to(tl.int32, bitcast=True)
    # The number in the upper half tells the reader that the lower half is this operation's data.
    sealed = stamp | (own.to(tl.int64) & 0xFFFFFFFF)
    for step in tl.static_range(1, WORLD):
        peer: tl.constexpr = (RANK + step) % WORLD
        mailbox = tl.load(table + peer).to(tl.pointer_type(tl.int64))
        tl.store(mailbox + (slot + RANK) * ROOM + at, sealed, mask=known, cache_modifier=".wt")
    mine = tl.load(table + RANK).to(tl.pointer_type(tl.int64))
    low = tl.zeros([BLOCK], dtype=tl.float32)
    high = tl.zeros([BLOCK], dtype=tl.float32)
    # The order of ranks, the same on every device, so that all ranks get the same bits.
    for rank in tl.static_range(WORLD):
        word = own
        if rank != RANK:
            word = _wait(mine + (slot + rank) * ROOM + at, known, number, count, MAX_POLLS)
        if PACKED:
            low += (word << 16).to(tl.float32, bitcast=True)
            high += (word & -65536).to(tl.float32, bitcast=True)
        else:
            low += word.to(tl.float32, bitcast=True)
    if PACKED:
        _store_pairs(out + at, known, low, high, ADDS)
    else:
        if ADDS:
            low += tl.load(out + at, mask=known, other=0).to(tl.float32)
        tl.store(out + at, low.to(out.dtype.element_ty), mask=known)


@kernel
def _wait(places: tl.tensor, known: tl.tensor, number: tl.tensor, count: tl.tensor,
          MAX_POLLS: tl.constexpr) -> tl.tensor:
    """Return the words of operation ``number`` once they have arrived, or NaN after ``MAX_POLLS`` polls.
    """
    max_polls = tl.where(tl.load(count + 1) == 0, MAX_POLLS, 0)
    stamp = number.to(tl.int64)
    came = tl.load(places, mask=known, other=0, volatile=True)
    missing = tl.sum((known & ((came >> 32) != stamp)).to(tl.int32), 0)
    looks = 0
    while (missing > 0) & (looks < max_polls):
        came = tl.load(places, mask=known, other=0, volatile=True)
        missing = tl.sum((known & ((came >> 32) != stamp)).to(tl.int32), 0)
        looks += 1
    tl.store(count + 1, 1, mask=missing > 0)
    # This word is NaN in both formats, so sampling reports an error for every token that follows.
    return tl.where(missing > 0, 0x7FC07FC0, came.to(tl.int32))


@kernel
def _store_pairs(places: tl.tensor, known: tl.tensor, low: tl.tensor, high: tl.tensor,
                 ADDS: tl.constexpr) -> None:
    """Store two bfloat16 in each int32, the first in the lower half."""
    if ADDS:
        before = tl.load(places, mask=known, other=0)
        low += (before << 16).to(tl.float32, bitcast=True)
        high += (before & -65536).to(tl.float32, bitcast=True)
    first = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    second = high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16
    tl.store(places, first | second, mask=known)
