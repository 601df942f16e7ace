"""Ranks of one stage as threads of one process: partial sums are added in the order of ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

_T = TypeVar("_T")
_LONGEST_S = 60.0


class ThreadGroup:
    """Hold the shared state of the ranks. `members` has one `Collective` for each."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=_LONGEST_S)
        self.parts: list[torch.Tensor] = [torch.empty(0)] * world_size
        self.members = [ThreadCollective(self, rank) for rank in range(world_size)]


class ThreadCollective:
    """Represent one rank's end."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.rank = rank
        self.world_size = group.barrier.parties
        # The number of elements that were added up so far.
        self.num_elements = 0
        self._group = group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, in their order."""
        assert x.is_contiguous()
        self.num_elements += x.numel()
        parts = self._exchange(x)
        assert len({part.shape for part in parts}) == 1
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        self._group.barrier.wait()
        return total

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """Return the parts of all ranks on rank 0, and None on the others."""
        parts = self._exchange(x)
        assert len({part.shape for part in parts}) == 1
        found = [part.clone() for part in parts] if self.rank == 0 else None
        self._group.barrier.wait()
        return found

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._group.parts[self.rank] = x
        self._group.barrier.wait()
        return list(self._group.parts)


def on_every_rank(ranks: Sequence[_T], work: Callable[[_T], torch.Tensor]) -> list[torch.Tensor]:
    """Run ``work`` for each rank at the same time. Raise the first error of any."""
    found: dict[int, torch.Tensor] = {}
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            found[index] = work(ranks[index])
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread that asked
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return [found[index] for index in range(len(ranks))]


class RankStages:
    """Mimic one stage over its ranks, as far as `support.tiny_models.Chain` needs it."""

    def __init__(self, stages: Sequence[object]) -> None:
        from convoy.model.backends.host.stage import HostStage

        self.stages = [stage for stage in stages if isinstance(stage, HostStage)]
        self.group = ThreadGroup(len(self.stages))
        for stage, member in zip(self.stages, self.group.members, strict=True):
            stage.join(member)
        first = self.stages[0]
        self.assignment, self.block_bytes = first.assignment, first.block_bytes
        self.takes_tokens, self.select = first.takes_tokens, first.select

    def make_pools(self, num_blocks: int) -> None:
        for stage in self.stages:
            stage.make_pools(num_blocks)

    def run(self, step: object, hidden: torch.Tensor | None, tokens: torch.Tensor | None) -> torch.Tensor:
        outs = on_every_rank(self.stages, lambda stage: stage.run(step, hidden, tokens))  # type: ignore[arg-type]
        assert all(torch.equal(out, outs[0]) for out in outs), "the ranks have different hidden states"
        return outs[0]

    def output(self, hidden: torch.Tensor) -> torch.Tensor:
        return on_every_rank(self.stages, lambda stage: stage.output(hidden))[0]
