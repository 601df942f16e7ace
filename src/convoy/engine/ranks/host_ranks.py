"""Ranks of one stage on one host as threads of this process (`--device cpu+cpu`), which act as one stage.

Each rank has its own slice of every layer, its own pools and its own thread. All threads run the same work in
the same order. Their sums cross no link.
"""

from __future__ import annotations

import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

import torch
from torch import nn

from convoy.engine.ranks.sums.local import GLOO, LocalRanks
from convoy.errors import CollectiveError, ConvoyError, StageLost, StepError
from convoy.model.backends.registry import load_slice
from convoy.model.checkpoints.source import ModelSource
from convoy.model.collective import Collective
from convoy.model.sampling.output_rows import SampleJob, SampleTask, sample_all, with_states
from convoy.model.stage import Computed, LoadedStage, PendingHidden, PendingSamples, RankSlice, StageOptions
from convoy.plan.spec.sharding import Shard, first_kv_head, kv_heads_of
from convoy.wire.messages.control import StageAssignment, Step

if TYPE_CHECKING:
    from convoy.model.checkpoints.stage_tensors import LoadProgress

T = TypeVar("T")
# The class of the ranks' slices.
SliceT = TypeVar("SliceT", bound=RankSlice[Any])
# Separates the devices of ranks; a comma separates stages.
JOIN = "+"
# The dimension of heads in [layers, 2, positions, heads, head_dim].
_HEADS = 3


class HostRanks(Protocol):
    """Hold the state that ranks share.

    It is a `LocalRanks` or a `model.backends.cuda.kernels.sums.DeviceRanks`.
    """

    @property
    def error(self) -> CollectiveError | None:
        """Return the error that ended the collective, or None."""
        ...

    @property
    def ends(self) -> Sequence[Any]:
        """Return the object that each rank joins, in rank order."""
        ...

    def abort(self, error: ConvoyError) -> CollectiveError:
        """End the collective for all ranks and return the error that each of them gets."""
        ...


class RankThread:
    """Run one rank's work on its own thread, in order."""

    def __init__(self, name: str, num_threads: int) -> None:
        self.queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        run = threading.Thread(target=_run, args=(self.queue, num_threads), name=name, daemon=True)
        run.start()

    def put(self, work: Callable[[], T]) -> Future[T]:
        """Queue ``work``, and return the future of its result."""
        done: Future[T] = Future()
        self.queue.put(partial(_settle, work, done))
        return done


def _run(works: queue.SimpleQueue[Callable[[], None] | None], num_threads: int) -> None:
    # Sets the number for this thread, and for the process.
    torch.set_num_threads(num_threads)
    while (work := works.get()) is not None:
        work()
        # The next wait must not keep the tensors of this work alive.
        del work


def _settle(work: Callable[[], T], done: Future[T]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:  # noqa: BLE001 - raised in the thread that asked
        done.set_exception(error)


# The class of the state that the ranks share.
SharedT = TypeVar("SharedT", bound=HostRanks)


class RankStages(ABC, Generic[SliceT, SharedT]):
    """Present several ranks as one stage, rank 0 first. Not thread-safe, as a stage is not.

    If a rank fails while others wait for it, the collective is over: every later step raises
    `CollectiveError`, and the stage must be loaded again.
    """

    overlaps = False
    num_devices = 1

    def __init__(
        self, source: ModelSource, stages: Sequence[SliceT], threads: Sequence[RankThread], ranks: SharedT
    ) -> None:
        first = stages[0]
        self.assignment = first.assignment
        self.hidden_size = first.hidden_size
        self.output_size = first.output_size
        self.vocab_size = first.vocab_size
        self.token_id_layers = first.token_id_layers
        self.weight_bytes = sum(stage.weight_bytes for stage in stages)
        self.bytes_read = sum(stage.bytes_read for stage in stages)
        self.weight_share = max(stage.weight_share for stage in stages)
        self.block_size = first.block_size
        self.stages = tuple(stages)
        self._num_kv_heads = {group.num_kv_heads for group in source.spec.cache_groups}
        self._threads = tuple(threads)
        self._ranks = ranks
        self._end = weakref.finalize(self, _end_threads, self._threads)
        for stage, end in zip(stages, ranks.ends, strict=True):
            stage.join(end)

    @classmethod
    def load(
        cls,
        source: ModelSource,
        assignment: StageAssignment,
        options: StageOptions,
        progress: LoadProgress | None = None,
        kept: Sequence[LoadedStage | None] = (),
    ) -> Self:
        """Load one rank after the other, each on its own thread. Raises as `load_stage` does, and PlanError.

        ``kept`` holds the stages that these ranks replace, by rank.
        """
        devices = options.device.split(JOIN)
        size = len(devices)
        ranks = cls._begin(devices, assignment.member)
        # The ranks share the processor's cores.
        num_threads = max(1, (options.num_threads or torch.get_num_threads()) // size)
        threads = [RankThread(f"rank {rank}", num_threads) for rank in range(size)]

        def load(rank: int) -> SliceT:
            own = replace(options, device=devices[rank], num_threads=num_threads)
            before = kept[rank] if rank < len(kept) else None
            tell = _after(progress, rank, size)
            rest: dict[str, Any] = {"progress": tell, "before": before, "shard": Shard(rank, size)}
            return cls._load_rank(source, assignment, own, **rest)

        try:
            stages = [thread.put(partial(load, rank)).result() for rank, thread in enumerate(threads)]
        except BaseException:
            _end_threads(threads)
            raise
        return cls(source, stages, threads, ranks)

    @classmethod
    @abstractmethod
    def _begin(cls, devices: Sequence[str], member: str) -> SharedT:
        """Return what the ranks on ``devices`` share."""

    @classmethod
    @abstractmethod
    def _load_rank(
        cls,
        source: ModelSource,
        assignment: StageAssignment,
        options: StageOptions,
        *,
        progress: LoadProgress | None,
        before: LoadedStage | None,
        shard: Shard,
    ) -> SliceT:
        """Load one rank's slice, on its own thread."""

    # What all ranks do.

    def forget(self) -> None:
        self._all(lambda stage: stage.forget())

    def make_pools(self, num_blocks: int | Sequence[int]) -> None:
        self._all(lambda stage: stage.make_pools(num_blocks))

    def apply(self, step: Step) -> None:
        self._all(lambda stage: stage.apply(step))

    def prepare(self, step: Step) -> None:
        """Do nothing: all ranks take the step at once."""

    def run(self, step: Step, hidden: torch.Tensor | None, tokens: torch.Tensor | None) -> torch.Tensor:
        """Run a step as `Stage.run` does. Raises `CollectiveError` if a rank fails or is late."""
        self._check()
        return self._all(lambda stage: stage.run(step, hidden, tokens))[0]

    def start(
        self,
        step: Step,
        hidden: torch.Tensor | None,
        tokens: torch.Tensor | None,
        *,
        selects: bool = False,
    ) -> PendingHidden:
        out = self.run(step, hidden, tokens)
        return Computed(self.select(step, out) if selects else out)

    def output(self, hidden: torch.Tensor) -> torch.Tensor:
        self._check()
        return self._all(lambda stage: stage.output(hidden))[0]

    def final_state(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `Stage.final_state`. Every rank has the whole norm, so the first one computes it alone."""
        return self.stages[0].final_state(hidden)

    def sample(self, hidden: torch.Tensor, jobs: Sequence[SampleJob]) -> PendingSamples:
        results = sample_all(self.output(hidden).numpy(), jobs)
        return SampleTask(with_states(results, jobs, lambda rows: self.final_state(hidden[rows]).numpy()))

    def read_blocks(self, start: int, end: int, blocks: Sequence[int]) -> torch.Tensor:
        """Return the K/V of `Stage.read_blocks` with the heads of all ranks."""
        parts = self._all(lambda stage: stage.read_blocks(start, end, blocks))
        whole = torch.empty(self.kv_shape(end - start, len(blocks)))
        for stage, part in zip(self.stages, parts, strict=True):
            whole[..., self._heads(stage), :] = part
        return whole

    def write_blocks(
        self, start: int, blocks: Sequence[int], tags: Sequence[bytes], kv: torch.Tensor
    ) -> None:
        """Write K/V as `Stage.write_blocks` does; each rank gets its own heads."""
        wanted = self.kv_shape(kv.shape[0] if kv.dim() else 0, len(blocks))
        if tuple(kv.shape) != wanted:
            raise StepError(f"K/V of a session has shape {list(kv.shape)}, expected {list(wanted)}")
        self._write(
            lambda stage: stage.write_blocks(start, blocks, tags, kv[..., self._heads(stage), :].contiguous())
        )

    def _write(self, work: Callable[[SliceT], None]) -> None:
        self._all(work)

    # What one of them knows for all.

    def select(self, step: Step, hidden: torch.Tensor) -> torch.Tensor:
        return self.stages[0].select(step, hidden)

    def kv_shape(self, num_layers: int, num_blocks: int) -> tuple[int, ...]:
        own = self.stages[0].kv_shape(num_layers, num_blocks)
        return (*own[:_HEADS], self._kv_heads, *own[_HEADS + 1 :])

    @property
    def takes_tokens(self) -> bool:
        return self.stages[0].takes_tokens

    @property
    def model_digest(self) -> str:
        return self.stages[0].model_digest

    @property
    def layers(self) -> Mapping[int, nn.Module]:
        """Return rank 0's layers."""
        return self.stages[0].layers

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Return the bytes of a block on all ranks together, by cache group."""
        return tuple(map(sum, zip(*(stage.block_bytes for stage in self.stages), strict=True)))

    def room_bytes(self, offered_bytes: int) -> int:
        return offered_bytes - self.weight_bytes

    def give_up(self) -> None:
        """End the ranks and free their K/V."""
        for stage in self.release():
            stage.forget()

    def release(self) -> list[SliceT]:
        """End the ranks and return their stages, from which a replacement may take weights."""
        self._ranks.abort(StageLost("the stage was given up"))
        self._end()
        return list(self.stages)

    # How.

    @property
    def _kv_heads(self) -> int:
        (count,) = self._num_kv_heads if len(self._num_kv_heads) == 1 else (0,)
        return count

    def _heads(self, stage: SliceT) -> slice:
        first = first_kv_head(self._kv_heads, stage.shard)
        return slice(first, first + kv_heads_of(self._kv_heads, stage.shard.world_size))

    def _check(self) -> None:
        if self._ranks.error is not None:
            raise self._ranks.error

    def _all(self, work: Callable[[SliceT], T]) -> list[T]:
        """Run ``work`` on every rank at once and return the results by rank.

        A rank that fails ends the collective, so that no other rank waits for it.
        """
        running = [
            thread.put(partial(work, stage)) for thread, stage in zip(self._threads, self.stages, strict=True)
        ]
        errors: list[BaseException] = []
        for one in running:
            # A failure must end the collective at once, from the failing rank's thread: the others may wait
            # in it.
            one.add_done_callback(self._ended)
        for one in running:
            try:
                one.result()
            except BaseException as error:  # noqa: BLE001 - raised below, once no rank runs any more
                errors.append(error)
        if errors:
            # A `CollectiveError` only follows from another rank's failure, so raise the cause where there is
            # one.
            raise next((e for e in errors if not isinstance(e, CollectiveError)), errors[0])
        return [one.result() for one in running]

    def _ended(self, done: Future[T]) -> None:
        error = done.exception()
        # Every rank refuses an invalid step alike, before any of them waits, so a `StepError` ends nothing.
        if error is not None and not isinstance(error, StepError):
            failed = (
                error
                if isinstance(error, ConvoyError)
                else StageLost(f"a rank failed: {type(error).__name__}")
            )
            self._ranks.abort(failed)


class HostRankStages(RankStages[RankSlice[Collective], LocalRanks]):
    """Run `RankStages` on this host: on its processor, or on MLX."""

    @classmethod
    def _begin(cls, devices: Sequence[str], member: str) -> LocalRanks:
        return LocalRanks(GLOO, [member] * len(devices))

    @classmethod
    def _load_rank(
        cls,
        source: ModelSource,
        assignment: StageAssignment,
        options: StageOptions,
        *,
        progress: LoadProgress | None,
        before: LoadedStage | None,
        shard: Shard,
    ) -> RankSlice[Collective]:
        return load_slice(source, assignment, options, shard, progress, before=before)


def _end_threads(threads: Sequence[RankThread]) -> None:
    for thread in threads:
        thread.queue.put(None)


def _after(progress: LoadProgress | None, rank: int, size: int) -> LoadProgress | None:
    """Convert one rank's progress to that of all ranks, which have the same size."""
    if progress is None:
        return None
    return lambda loaded, total: progress(rank * total + loaded, size * total)
