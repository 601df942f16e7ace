"""Collectives of ranks that one member holds on one host: gloo, or nccl between CUDA devices, bound to `lo`.

Their data is not sealed: the host is the trust boundary. Ranks are threads of one process, so no group is
ever joined over a network. Neither library promises an order of sums for more than two ranks; so all ranks
get all parts, and each adds them in the order of ranks.
"""

from __future__ import annotations

import datetime
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

from convoy.engine.ranks.sums.pieces import add_in_order, dtype_name
from convoy.errors import CollectiveError, ConvoyError, PlanError

GLOO, NCCL = "gloo", "nccl"
_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
# PyTorch's process groups have no types.
_c10d: Any = distributed
# A wait is cut into slices, to check in between whether the ranks have ended.
_SLICE_S = 0.1


class LocalRanks:
    """Hold the state that the ranks of one member share; `ends` has one `LocalCollective` for each rank.

    ``holders`` names the member of each rank. Raises `PlanError` for ranks of several members, and if PyTorch
    lacks the backend; raises `CollectiveError` if the ranks do not find each other by the deadline.
    """

    def __init__(self, backend: str, holders: Sequence[str], deadline_s: float = 60.0) -> None:
        check_plain(backend, holders)
        self.backend = backend
        self.deadline_s = deadline_s
        self.error: CollectiveError | None = None
        self._lock = threading.Lock()
        self.ends = [LocalCollective(self, rank, len(holders)) for rank in range(len(holders))]
        store = _c10d.HashStore()
        threads = [threading.Thread(target=end.start, args=(store,), daemon=True) for end in self.ends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(deadline_s + 1)
        missing = [end.rank for end in self.ends if not end.is_up]
        if missing:
            error = CollectiveError(f"rank {missing[0]} did not join the {backend} group", rank=missing[0])
            raise self.abort(error)

    def abort(self, error: ConvoyError) -> CollectiveError:
        """End the collectives: waiting ranks raise within a moment.

        Return the error that all ranks get; the first call counts.
        """
        with self._lock:
            if self.error is None:
                if not isinstance(error, CollectiveError):
                    error = CollectiveError(error.message, hint=error.hint, public=error.public)
                self.error = error
        # Idle ends let go of the group at once, and closing them wakes operations in other threads.
        for end in self.ends:
            end.leave()
        return self.error

    def behind(self, number: int) -> list[int]:
        """Return the ranks that have not come to this operation."""
        return [end.rank for end in self.ends if end.num_begun <= number]


class LocalCollective:
    """Represent one rank's end, for one thread; any thread may call `abort`."""

    def __init__(self, ranks: LocalRanks, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.num_begun = 0
        self._ranks = ranks
        self._process_group: Any = None
        self._busy = False

    @property
    def is_up(self) -> bool:
        return self._process_group is not None

    def start(self, store: object) -> None:
        """Find the other ranks. Return when all have come, or at the deadline without them."""
        make = _nccl if self._ranks.backend == NCCL else _gloo
        try:
            self._process_group = make(store, self.rank, self.world_size, self._ranks.deadline_s)
        except RuntimeError as error:
            self._ranks.error = self._ranks.error or CollectiveError(
                f"rank {self.rank} could not join the {self._ranks.backend} group: {_first_line(error)}",
                rank=self.rank,
            )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks in their order, in new memory. Raises CollectiveError."""
        dtype_name(x)
        parts = self._all(x, "an all-reduce")
        out = torch.empty_like(parts[0])
        add_in_order(parts, out)
        return out

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """Return the tensors of all ranks in their order at rank 0, and None at the others.

        Raises CollectiveError.
        """
        parts = self._all(x, "a gather")
        return parts if self.rank == 0 else None

    def abort(self, error: ConvoyError) -> None:
        """End the collectives of all ranks."""
        self._ranks.abort(error)

    def rest(self) -> None:
        """Do nothing: nothing is held up between operations."""

    def leave(self) -> None:
        """Let go of the group; an operation under way here does so at its end instead."""
        if not self._busy:
            self._process_group = None

    def _all(self, x: torch.Tensor, what: str) -> list[torch.Tensor]:
        x = x.detach().contiguous()
        parts = [torch.empty_like(x) for _ in range(self.world_size)]
        number, self.num_begun = self.num_begun, self.num_begun + 1
        self._busy = True
        try:
            process_group = self._process_group
            if self._ranks.error is not None or process_group is None:
                raise self._ranks.error or CollectiveError("the group is over")
            if x.numel():
                # Before the library's own deadline begins, so that its timeout never comes before this one.
                until_s = time.monotonic() + self._ranks.deadline_s
                self._wait(process_group.allgather([parts], [x]), number, what, until_s)
            return parts
        finally:
            self._busy = False
            if self._ranks.error is not None:
                self._process_group = None

    def _wait(self, work: Any, number: int, what: str, until_s: float) -> None:
        ranks = self._ranks
        where = f"operation {number}, {what} of {ranks.backend}"
        while not _is_done(work, min(_SLICE_S, max(0.001, until_s - time.monotonic()))):
            if ranks.error is not None:
                raise ranks.error
            if time.monotonic() >= until_s:
                raise ranks.abort(self._late(number, where))
        try:
            work.wait()
        except RuntimeError as error:
            if ranks.error is not None:
                raise ranks.error from error
            # The library's timeout only says which of its operations waited.
            if time.monotonic() >= until_s and ranks.behind(number):
                raise ranks.abort(self._late(number, where)) from error
            text = f"{where}, failed at rank {self.rank}: {_first_line(error)}"
            raise ranks.abort(CollectiveError(text)) from error

    def _late(self, number: int, where: str) -> CollectiveError:
        """Return the error that names the first rank that did not come to operation ``number``."""
        late = next(iter(self._ranks.behind(number)), None)
        text = f"rank {late} did not come to {where}, within {self._ranks.deadline_s:g} s"
        return CollectiveError(text, rank=late)


def check_plain(backend: str, holders: Sequence[str]) -> None:
    """Raise `PlanError` for a collective that may not, or cannot, run without sealing."""
    if backend not in {GLOO, NCCL}:
        raise PlanError(f"{backend!r} is no plain collective, expected {GLOO} or {NCCL}")
    members = list(dict.fromkeys(holders))
    if len(members) > 1:
        raise PlanError(
            f"{backend} between {' and '.join(members)} would send partial sums in clear: only ranks of one "
            "member, on one host, may use it",
            hint="ranks on several members add through sealed links, with no setting",
        )
    has = {GLOO: distributed.is_gloo_available, NCCL: distributed.is_nccl_available}[backend]
    if not (distributed.is_available() and has()):
        raise PlanError(f"this build of PyTorch has no {backend}")


def _gloo(store: object, rank: int, world_size: int, deadline_s: float) -> object:
    kind = _c10d.ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(interface=_LOOPBACK)]
    options._timeout = datetime.timedelta(seconds=deadline_s)
    # A rank's operations come one after the other.
    options._threads = 1
    return kind(_c10d.PrefixStore(GLOO, store), rank, world_size, options)


def _nccl(store: object, rank: int, world_size: int, deadline_s: float) -> object:
    kind = _c10d.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = datetime.timedelta(seconds=deadline_s)
    return kind(_c10d.PrefixStore(NCCL, store), rank, world_size, options)


def _is_done(work: Any, within_s: float) -> bool:
    """Wait at most ``within_s`` and return whether the work has ended, well or not."""
    try:
        work.wait(datetime.timedelta(seconds=within_s))
    except RuntimeError:
        return bool(work.is_completed())
    return True


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
