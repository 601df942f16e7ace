"""Ranks of one stage on CUDA devices of one host (`--device cuda:0+cuda:1`), which act as one stage.

They work as host ranks do (`engine.ranks.host_ranks`), but no thread waits for a step, and the devices
compute sums by themselves (`kernels.sums`). One thread starts captured decodes; each rank's own thread does
everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from convoy.engine.ranks.device_results import WatchedResult, WatchedSamples
from convoy.engine.ranks.host_ranks import RankStages
from convoy.errors import StageLost
from convoy.model.backends.cuda.batch import CheckedStep
from convoy.model.backends.cuda.graphs import DecodeGraph
from convoy.model.backends.cuda.kernels.sums import DeviceRanks
from convoy.model.backends.cuda.memory.pending import PendingResult
from convoy.model.backends.cuda.options import check_kv_dtype
from convoy.model.backends.cuda.stage import CudaStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.device import check_device
from convoy.model.sampling.output_rows import SampleJob
from convoy.model.stage import LoadedStage, StageOptions
from convoy.plan.spec.sharding import Shard
from convoy.wire.messages.control import StageAssignment, Step

if TYPE_CHECKING:
    from convoy.model.checkpoints.stage_tensors import LoadProgress


class DeviceRankStages(RankStages[CudaStage, DeviceRanks]):
    """Run `RankStages` on devices; callers wait for the results of `start` and `sample` as needed."""

    overlaps = True
    # The hidden states of the last started step, by rank: each rank samples from its own.
    _hidden: Sequence[torch.Tensor] = ()

    def start(
        self,
        step: Step,
        hidden: torch.Tensor | None,
        tokens: torch.Tensor | None,
        *,
        selects: bool = False,
    ) -> WatchedResult:
        """Start a step as `CudaStage.start` does.

        Only the first rank has tables, so it checks the step for all.
        """
        self._check()
        checked = self.stages[0].check(step, hidden, tokens)
        found = self._replayed(checked, selects=selects)
        if found is None:
            found = self._all(lambda stage: stage.launch(checked, selects=selects))
        self._hidden = [one.tensor for one in found]
        return WatchedResult(found[0], self._ranks.check_sums)

    def _replayed(self, checked: CheckedStep, *, selects: bool) -> list[PendingResult] | None:
        """Start a decode that all ranks have captured, one rank right behind the other; None if one has not.

        The first device waits for the second inside the graph, so nothing that may wait for a device comes in
        between.
        """
        graphs: list[DecodeGraph] = []
        for stage in self.stages:
            graph = stage.fill(checked, graphs[0] if graphs else None)
            if graph is None:
                return None
            graphs.append(graph)
        try:
            # Every graph is filled by now. Filling may wait for a device, and the first replay waits for the
            # second.
            for graph in graphs:
                graph.replay()
        except BaseException:
            self._ranks.abort(StageLost("a rank could not begin a step"))
            raise
        both = zip(graphs, self.stages, strict=True)
        return [stage.left(graph, checked, selects=selects) for graph, stage in both]

    def run(self, step: Step, hidden: torch.Tensor | None, tokens: torch.Tensor | None) -> torch.Tensor:
        found: torch.Tensor = self.start(step, hidden, tokens).wait()
        return found

    def apply(self, step: Step) -> None:
        self.stages[0].apply(step)

    def sample(self, hidden: torch.Tensor, jobs: Sequence[SampleJob]) -> WatchedSamples:
        """Sample as `CudaStage.sample` does, with every rank's share of the vocabulary."""
        self._check()
        own = [hidden] * len(self.stages)
        if self._hidden and self._hidden[0] is hidden:
            own = list(self._hidden)
        for stage, mine in zip(self.stages[1:], own[1:], strict=True):
            stage.take_part(mine)
        return WatchedSamples(self.stages[0].sample(hidden, jobs), self._ranks.check_sums)

    def _write(self, work: Callable[[CudaStage], None]) -> None:
        # Only the first rank knows which blocks are free, and refuses others before the other ranks write.
        for stage in self.stages:
            work(stage)

    def room_bytes(self, offered_bytes: int) -> int:
        """Return the most bytes of K/V that fit on every device; each holds its heads of every block."""
        rooms = self._all(lambda stage: stage.room_bytes(offered_bytes // len(self.stages)))
        whole = self.block_bytes
        found = []
        for room, stage in zip(rooms, self.stages, strict=True):
            share = max(
                (own / all_ for own, all_ in zip(stage.block_bytes, whole, strict=True) if all_), default=0
            )
            found.append(int(room / share) if share else room)
        return min(found)

    @classmethod
    def _begin(cls, devices: Sequence[str], member: str) -> DeviceRanks:  # noqa: ARG003 - of a host
        return DeviceRanks([check_device(device) for device in devices])

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
    ) -> CudaStage:
        check_kv_dtype(options.kernel, options.kv_dtype)
        return CudaStage.load(
            *(source, assignment),
            device=options.device,
            kernel=options.kernel,
            block_size=options.block_size,
            require_tags=options.require_tags,
            captured=options.captured,
            progress=progress,
            before=before,
            shard=shard,
        )
