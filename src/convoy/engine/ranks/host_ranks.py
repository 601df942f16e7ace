"""Ranks of one stage on one host as threads of this process (`--device cpu+cpu`), with the face of one stage.

Each rank has its own slice of every layer, its own pools and its own thread, which runs what all ranks run,
in the same order. What they add up crosses no link.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch
from torch import nn

from convoy.engine.ranks.sums.local import GLOO, LocalGroup
from convoy.errors import CollectiveError, ConvoyError, StageLost, StepError
from convoy.model.backends.host.stage import Computed, Stage, StageOptions
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.output_rows import SampleJob, SampleTask, draw_all
from convoy.plan.spec.sharding import WHOLE, Shard, first_kv_head, kv_heads_of
from convoy.wire.messages.control import StageAssignment, Step

if TYPE_CHECKING:
    from convoy.model.checkpoints.reading import LoadProgress

T = TypeVar("T")
Work = tuple[Callable[[], object], "Future[object]"]
JOIN = "+"  # between the devices of ranks; a comma separates stages
_HEADS = 3  # the dimension of heads in [layers, 2, positions, heads, head_dim]


class HostRanks(Protocol):
    """What ranks share; `local.LocalGroup` or `model.backends.cuda.kernels.sums.DeviceGroup`."""

    @property
    def error(self) -> CollectiveError | None:
        """Why it is over."""
        ...

    @property
    def ends(self) -> Sequence[Any]:
        """What each rank joins, in their order."""
        ...

    def abort(self, error: ConvoyError) -> CollectiveError:
        """It is over, for all; what everybody gets."""
        ...


class RankThread:
    """Runs what one rank runs, in order."""

    def __init__(self, name: str, num_threads: int) -> None:
        self.queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        run = threading.Thread(target=_run, args=(self.queue, num_threads), name=name, daemon=True)
        run.start()

    def put(self, work: Callable[[], object]) -> Future[object]:
        done: Future[object] = Future()
        self.queue.put((work, done))
        return done


def _run(works: queue.SimpleQueue[Work | None], num_threads: int) -> None:
    torch.set_num_threads(num_threads)  # of this thread, and of the process
    while (item := works.get()) is not None:
        work, done = item
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised in the thread that asked
            done.set_exception(error)
        del item, work, done


class RankStages:
    """The ranks, rank 0 first. Not thread-safe, as a stage is not.

    After a rank failed while others waited for it the group is over: every later step raises
    `CollectiveError`, and the stage is to be loaded again.
    """

    overlaps = False
    num_devices = 1

    def __init__(
        self, source: ModelSource, stages: Sequence[Stage], threads: Sequence[RankThread], group: HostRanks
    ) -> None:
        first = stages[0]
        self.assignment = first.assignment
        self.hidden_size = first.hidden_size
        self.vocab_size = first.vocab_size
        self.token_id_layers = first.token_id_layers
        self.weight_bytes = sum(stage.weight_bytes for stage in stages)
        self.bytes_read = sum(stage.bytes_read for stage in stages)
        self.weight_share = max(stage.weight_share for stage in stages)
        self.options = first.options
        self.stages = tuple(stages)
        self._num_kv_heads = {group.num_kv_heads for group in source.spec.cache_groups}
        self._threads = tuple(threads)
        self._group = group
        self._end = weakref.finalize(self, _end_threads, self._threads)
        for stage, end in zip(stages, group.ends, strict=True):
            stage.join(end)

    @classmethod
    def load(
        cls,
        source: ModelSource,
        assignment: StageAssignment,
        options: StageOptions,
        progress: LoadProgress | None = None,
        kept: Sequence[Stage | None] = (),
    ) -> RankStages:
        """One rank after the other, each on its own thread. Raises as `Stage.load`, and PlanError.

        ``kept``: the stages that these take the place of, by rank.
        """
        devices = options.device.split(JOIN)
        size = len(devices)
        group = cls._begin_group(devices, assignment.member)
        num_threads = max(1, (options.num_threads or torch.get_num_threads()) // size)
        threads = [RankThread(f"rank {rank}", num_threads) for rank in range(size)]

        def load(rank: int) -> Stage:
            own = replace(options, device=devices[rank], num_threads=num_threads)
            before = kept[rank] if rank < len(kept) else None
            tell = _after(progress, rank, size)
            rest: dict[str, Any] = {"progress": tell, "before": before, "shard": Shard(rank, size)}
            return cls._load_rank(source, assignment, own, **rest)

        try:
            stages = [
                cast("Stage", thread.put(partial(load, rank)).result()) for rank, thread in enumerate(threads)
            ]
        except BaseException:
            _end_threads(threads)
            raise
        return cls(source, stages, threads, group)

    @classmethod
    def _begin_group(cls, devices: Sequence[str], member: str) -> HostRanks:
        return LocalGroup(GLOO, [member] * len(devices))

    @classmethod
    def _load_rank(
        cls,
        source: ModelSource,
        assignment: StageAssignment,
        options: StageOptions,
        *,
        progress: LoadProgress | None,
        before: Stage | None,
        shard: Shard,
    ) -> Stage:
        return Stage.load(source, assignment, options, progress, before=before, shard=shard)

    # What all ranks do.

    def forget(self) -> None:
        self._all(lambda stage: stage.forget())

    def make_pools(self, num_blocks: int | Sequence[int]) -> None:
        self._all(lambda stage: stage.make_pools(num_blocks))

    def apply(self, step: Step) -> None:
        self._all(lambda stage: stage.apply(step))

    def run(self, step: Step, hidden: torch.Tensor | None, tokens: torch.Tensor | None) -> torch.Tensor:
        """As `Stage.run`. Raises `CollectiveError` where a rank failed, or does not do its part in time."""
        self._check()
        return self._all(lambda stage: stage.run(step, hidden, tokens))[0]

    def start(
        self,
        step: Step,
        hidden: torch.Tensor | None,
        tokens: torch.Tensor | None,
        *,
        selects: bool = False,
    ) -> Computed:
        out = self.run(step, hidden, tokens)
        return Computed(self.select(step, out) if selects else out)

    def output(self, hidden: torch.Tensor) -> torch.Tensor:
        self._check()
        return self._all(lambda stage: stage.output(hidden))[0]

    def draw(self, hidden: torch.Tensor, draws: Sequence[SampleJob]) -> SampleTask:
        return SampleTask(draw_all(self.output(hidden).numpy(), draws))

    def read_blocks(self, start: int, end: int, blocks: Sequence[int]) -> torch.Tensor:
        """As `Stage.read_blocks`, with the K/V heads of all ranks."""
        parts = self._all(lambda stage: stage.read_blocks(start, end, blocks))
        whole = torch.empty(self.kv_shape(end - start, len(blocks)))
        for stage, part in zip(self.stages, parts, strict=True):
            whole[..., self._heads(stage), :] = part
        return whole

    def write_blocks(
        self, start: int, blocks: Sequence[int], tags: Sequence[bytes], kv: torch.Tensor
    ) -> None:
        """As `Stage.write_blocks`: each rank gets its K/V heads."""
        wanted = self.kv_shape(kv.shape[0] if kv.dim() else 0, len(blocks))
        if tuple(kv.shape) != wanted:
            raise StepError(f"K/V of a session has shape {list(kv.shape)}, expected {list(wanted)}")
        self._write(
            lambda stage: stage.write_blocks(start, blocks, tags, kv[..., self._heads(stage), :].contiguous())
        )

    def _write(self, work: Callable[[Stage], None]) -> None:
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
        """Rank 0's."""
        return self.stages[0].layers

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Of all ranks together."""
        return tuple(map(sum, zip(*(stage.block_bytes for stage in self.stages), strict=True)))

    def room_bytes(self, offered_bytes: int) -> int:
        return offered_bytes - self.weight_bytes

    def give_up(self, _source: ModelSource, _options: StageOptions, _shard: Shard = WHOLE) -> None:
        """As of one; nothing is kept for a stage of another kind."""
        for stage in self.release():
            stage.forget()

    def release(self) -> list[Stage]:
        """It is over; what each rank has, for those that take their place."""
        self._group.abort(StageLost("the stage was given up"))
        self._end()
        return list(self.stages)

    # How.

    @property
    def _kv_heads(self) -> int:
        (count,) = self._num_kv_heads if len(self._num_kv_heads) == 1 else (0,)
        return count

    def _heads(self, stage: Stage) -> slice:
        first = first_kv_head(self._kv_heads, stage.shard)
        return slice(first, first + kv_heads_of(self._kv_heads, stage.shard.world_size))

    def _check(self) -> None:
        if self._group.error is not None:
            raise self._group.error

    def _all(self, work: Callable[[Stage], T]) -> list[T]:
        """On every rank at once. A rank that fails ends the group, so that none waits for it."""
        running = [
            thread.put(lambda stage=stage: work(stage))  # type: ignore[misc]
            for thread, stage in zip(self._threads, self.stages, strict=True)
        ]
        errors: list[BaseException] = []
        for one in running:
            one.add_done_callback(self._ended)
        for one in running:
            try:
                one.result()
            except BaseException as error:  # noqa: BLE001 - raised below, once no rank runs any more
                errors.append(error)
        if errors:
            raise next((e for e in errors if not isinstance(e, CollectiveError)), errors[0])
        return [cast("T", one.result()) for one in running]

    def _ended(self, done: Future[object]) -> None:
        error = done.exception()
        # what a step is refused for is refused by every rank, before any of them waits
        if error is not None and not isinstance(error, StepError):
            failed = (
                error
                if isinstance(error, ConvoyError)
                else StageLost(f"a rank failed: {type(error).__name__}")
            )
            self._group.abort(failed)


def _end_threads(threads: Sequence[RankThread]) -> None:
    for thread in threads:
        thread.queue.put(None)


def _after(progress: LoadProgress | None, rank: int, size: int) -> LoadProgress | None:
    """The progress of one rank as that of all, which are as large."""
    if progress is None:
        return None
    return lambda loaded, total: progress(rank * total + loaded, size * total)
