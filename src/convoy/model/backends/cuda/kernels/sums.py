"""Sums over ranks whose devices reach each other's memory: one kernel, in which ranks wait for each other.

A rank writes its part into a mailbox on every other device, each word beside the number of the operation, so
that data and flag come in one store (as NCCL's low-latency protocol has it), and then adds all parts in the
order of ranks, in float32. Nothing is asked of the host, so a captured decode holds them.

A mailbox has two slots in turn: who begins operation n + 2 has seen that the others began n + 1, and so were
done with n. Steps that are not captured meet on the host before each operation: a kernel that waits must not
meet one that cannot start, because its thread waits for memory, which needs the waiting device.
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

_ROOM = 1 << 20  # words of a mailbox for each rank and slot; longer sums are made in pieces
_BLOCK = 512  # words of a program
# looks into a mailbox, tens of seconds; then the sum is no number: see `DeviceGroup.check_sums`
_PATIENCE = 1 << 24

Gathered = tuple[torch.Tensor, torch.cuda.Event]  # and when it is there


class DeviceGroup:
    """What ranks on ``devices``, one thread for each, have in common; ``ends`` has one `DeviceSums` for each.

    Raises PlanError where devices do not reach each other's memory.
    """

    def __init__(self, devices: Sequence[torch.device], deadline_s: float = 60.0) -> None:
        self.deadline_s = deadline_s
        self.error: CollectiveError | None = None
        self.capturing = threading.Lock()  # one rank at a time: the libraries' memory is all threads'
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
        """It is over: who waits on the host raises. The first call counts; what everybody gets."""
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
        """Raises CollectiveError, for all from here on, where a kernel gave up; waits for the devices."""
        if any(end.gave_up for end in self.ends):
            raise self.abort(CollectiveError("a rank did not come to a sum on its device"))

    def meet(self) -> None:
        """Wait for all ranks. Raises CollectiveError where one does not come in time."""
        try:
            self._meeting.wait(self.deadline_s)
        except threading.BrokenBarrierError:
            late = CollectiveError(f"a rank did not come to a sum within {self.deadline_s:g} s")
            raise self.abort(late) from None


class DeviceSums:
    """One rank's end, for one thread; the face of `Collective`."""

    def __init__(
        self, group: DeviceGroup, rank: int, device: torch.device, mailboxes: Sequence[torch.Tensor]
    ) -> None:
        self.rank = rank
        self.world_size = len(mailboxes)
        self.parts: queue.SimpleQueue[Gathered | None] = queue.SimpleQueue()  # for rank 0
        self._group = group
        self._mailboxes = tuple(mailboxes)  # kept, as the table has but their addresses
        self._table = torch.tensor([box.data_ptr() for box in mailboxes], device=device)
        # operations so far; those of the steps under way are counted on the host, and added at their ends
        # and behind them, whether a kernel here gave up; then the next ones wait for nobody
        self._count = torch.tensor([1, 0], dtype=torch.int32, device=device)
        self._begun = 0
        self.leaving = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def gave_up(self) -> bool:
        """Whether a kernel here waited in vain; nothing waits for anybody since. Waits for the device."""
        return bool(self._count[1].item())

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in new memory. Raises CollectiveError."""
        x = x.contiguous()
        return self.add(x, torch.empty_like(x))

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """On rank 0 what all ranks gave, on its device; None on the others, which do not wait for it.

        Raises CollectiveError.
        """
        if self.rank:
            done = torch.cuda.current_stream(x.device).record_event()
            self.parts.put((x, done))
            return None
        return [x, *(self._take(end, x.device) for end in self._group.ends[1:])]

    def add(self, part: torch.Tensor, out: torch.Tensor, *, adds: bool = False) -> torch.Tensor:
        """Into ``out`` the sum of all ranks' ``part``, float32 or bfloat16; ``adds``: to what is there."""
        flat, into = part.contiguous().view(-1), out.view(-1)
        packed = part.dtype == torch.bfloat16 == out.dtype and part.numel() % 2 == 0
        if packed:
            flat, into = flat.view(torch.int32), into.view(torch.int32)
        for begin in range(0, flat.numel(), _ROOM):
            self._one(flat[begin : begin + _ROOM], into[begin : begin + _ROOM], packed=packed, adds=adds)
        return out

    def finish(self) -> None:
        """A step is over: what comes next is numbered behind it, also where a captured one runs again."""
        if self._begun:
            self._count[:1].add_(self._begun)
            self._begun = 0

    @contextmanager
    def captures(self) -> Iterator[None]:
        """One rank captures at a time, once all have run what is captured."""
        self._group.meet()
        with self._group.capturing:
            yield
        self._group.meet()

    def meet(self) -> None:
        """Before what is captured runs. Raises CollectiveError."""
        self._group.meet()

    def _one(self, words: torch.Tensor, out: torch.Tensor, *, packed: bool, adds: bool) -> None:
        size = words.numel()

        def launch(programs: int) -> None:
            sum_kernel[programs,](
                out, words, self._table, self._count, self._begun, size, ROOM=_ROOM, RANK=self.rank,
                WORLD=self.world_size, BLOCK=_BLOCK, PACKED=packed, ADDS=adds, PATIENCE=_PATIENCE,
                num_warps=4,
            )  # fmt: skip

        if not torch.cuda.is_current_stream_capturing():
            launch(0)  # compiles and loads, where that is left to do
            self._group.meet()
        launch(-(-size // _BLOCK))
        self._begun += 1

    def _take(self, end: DeviceSums, device: torch.device) -> torch.Tensor:
        """For the current stream of ``device``; beside whatever else the other one does."""
        try:
            found = end.parts.get(timeout=self._group.deadline_s)
        except queue.Empty:
            late = CollectiveError(f"rank {end.rank} did not come to a gather", rank=end.rank)
            raise self._group.abort(late) from None
        if found is None:
            raise self._group.error or CollectiveError("the group is over")
        part, done = found
        with torch.cuda.stream(end.leaving):
            end.leaving.wait_event(done)
            there = part.to(device, non_blocking=True)
        part.record_stream(end.leaving)
        return there


def check_peers(devices: Sequence[torch.device]) -> None:
    """Raises PlanError for devices of which one does not reach another's memory."""
    for one in devices:
        for other in devices:
            if one != other and not torch.cuda.can_device_access_peer(one, other):
                raise PlanError(
                    f"{one} does not reach the memory of {other}, so they cannot share layers",
                    hint="hold whole layers on each device: " + ",".join(map(str, devices)),
                )


def _open_peers(devices: Sequence[torch.device]) -> None:
    """torch opens the way from a device to another with the first copy between them."""
    for one in devices:
        for other in devices:
            if one != other:
                torch.zeros(1, device=one).copy_(torch.ones(1, device=other))


# fmt: off


@kernel_of_any("begun", "size")
def sum_kernel(out: tl.tensor, words: tl.tensor, table: tl.tensor, count: tl.tensor, begun: tl.tensor,
               size: tl.tensor, ROOM: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
               BLOCK: tl.constexpr, PACKED: tl.constexpr, ADDS: tl.constexpr,
               PATIENCE: tl.constexpr) -> None:
    """Grid (size / BLOCK,); words are float32, or PACKED two bfloat16 in an int32."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = at < size
    number = tl.load(count) + begun
    slot = (number & 1) * WORLD
    stamp = number.to(tl.int64) << 32
    own = tl.load(words + at, mask=known, other=0)
    if not PACKED:
        own = own.to(tl.float32).to(tl.int32, bitcast=True)
    sealed = stamp | (own.to(tl.int64) & 0xFFFFFFFF)
    for step in tl.static_range(1, WORLD):
        peer: tl.constexpr = (RANK + step) % WORLD
        mailbox = tl.load(table + peer).to(tl.pointer_type(tl.int64))
        tl.store(mailbox + (slot + RANK) * ROOM + at, sealed, mask=known, cache_modifier=".wt")
    mine = tl.load(table + RANK).to(tl.pointer_type(tl.int64))
    low = tl.zeros([BLOCK], dtype=tl.float32)
    high = tl.zeros([BLOCK], dtype=tl.float32)
    for rank in tl.static_range(WORLD):
        word = own
        if rank != RANK:
            word = _wait(mine + (slot + rank) * ROOM + at, known, number, count, PATIENCE)
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
          PATIENCE: tl.constexpr) -> tl.tensor:
    """The words of operation ``number``, once they are there; after all patience, no numbers."""
    patience = tl.where(tl.load(count + 1) == 0, PATIENCE, 0)
    stamp = number.to(tl.int64)
    came = tl.load(places, mask=known, other=0, volatile=True)
    missing = tl.sum((known & ((came >> 32) != stamp)).to(tl.int32), 0)
    looks = 0
    while (missing > 0) & (looks < patience):
        came = tl.load(places, mask=known, other=0, volatile=True)
        missing = tl.sum((known & ((came >> 32) != stamp)).to(tl.int32), 0)
        looks += 1
    tl.store(count + 1, 1, mask=missing > 0)
    # which is said in every token that follows
    return tl.where(missing > 0, 0x7FC07FC0, came.to(tl.int32))


@kernel
def _store_pairs(places: tl.tensor, known: tl.tensor, low: tl.tensor, high: tl.tensor,
                 ADDS: tl.constexpr) -> None:
    """Of each int32 the lower and the upper bfloat16."""
    if ADDS:
        before = tl.load(places, mask=known, other=0)
        low += (before << 16).to(tl.float32, bitcast=True)
        high += (before & -65536).to(tl.float32, bitcast=True)
    first = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    second = high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16
    tl.store(places, first | second, mask=known)
