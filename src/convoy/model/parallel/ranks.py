"""The ranks of a stage as its modules see them: where partial sums become whole ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from convoy.errors import ModelError, StepError
from convoy.model.collective import Alone, Collective
from convoy.plan.spec.sharding import Shard


class Ranks:
    """One for all modules of a stage. Until `join` sums are partial, which is enough to try them out."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.joined = False
        self.num_rows: int | None = None  # of a step; those behind are copies of the last one
        self._collective: Collective = Alone()

    def join(self, collective: Collective) -> None:
        """Raises ModelError for another rank's collective."""
        found = (collective.rank, collective.world_size)
        if found != (self.shard.rank, self.shard.world_size):
            raise ModelError(
                f"a collective of rank {found[0]} of {found[1]} for a stage of rank {self.shard.rank} of "
                f"{self.shard.world_size}"
            )
        self._collective, self.joined = collective, True

    def leave(self) -> None:
        """Those who go on with the modules join others."""
        self._collective, self.joined, self.num_rows = Alone(), False, None

    def begin(self, num_rows: int) -> None:
        """A step of so many rows comes. Raises StepError before there is anybody to add with."""
        if not self.joined:
            raise StepError(f"rank {self.shard.rank} of {self.shard.world_size} has not joined the others")
        self.num_rows = num_rows

    def add(self, partial: torch.Tensor) -> torch.Tensor:
        """[..., rows, width] added up over all ranks. Copies of the last row need not travel."""
        rows = partial.shape[-2]
        real = rows if self.num_rows is None else min(rows, self.num_rows)
        total = self._collective.all_reduce(partial[..., :real, :].contiguous())
        if real == rows:
            return total
        return torch.cat((total, total[..., -1:, :].expand(*total.shape[:-2], rows - real, -1)), dim=-2)

    def gather(self, part: torch.Tensor, width: int) -> torch.Tensor:
        """On rank 0 all columns, ``width`` of them, on others ``part``: its own [rows, columns]."""
        parts = self._collective.gather(part.contiguous())
        return part if parts is None else torch.cat(parts, dim=-1)[:, :width]


class PartialSum(nn.Module):
    """A module that gives this rank's part of a sum, which goes on as the whole one.

    A linear whose inputs are shared out, or a layer's experts. A bias is in rank 0's part alone.
    """

    def __init__(self, part: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.part = part
        self._ranks = ranks

    def forward(self, *args: Any) -> torch.Tensor:
        """What ``part`` takes, to [..., rows, hidden]."""
        return self._ranks.add(self.part(*args))
