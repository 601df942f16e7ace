"""Connect a stage's modules to its ranks, which turn partial sums into whole ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from convoy.errors import ModelError, StepError
from convoy.model.collective import Alone, Collective
from convoy.plan.spec.sharding import Shard


class Ranks:
    """Hold the connection of one rank, shared by all modules of a stage.

    Until `join`, sums stay partial, which is enough to try the modules.
    """

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.joined = False
        # The rows of the current step. Rows behind them are copies of the last one.
        self.num_rows: int | None = None
        self._collective: Collective = Alone()

    def join(self, collective: Collective) -> None:
        """Use ``collective`` from now on. Raises ModelError for another rank's collective."""
        found = (collective.rank, collective.world_size)
        if found != (self.shard.rank, self.shard.world_size):
            raise ModelError(
                f"got a collective of rank {found[0]} of {found[1]} for a stage of rank {self.shard.rank} of "
                f"{self.shard.world_size}"
            )
        self._collective, self.joined = collective, True

    def leave(self) -> None:
        """Disconnect, so that a later stage can join these modules to other ranks."""
        self._collective, self.joined, self.num_rows = Alone(), False, None

    def begin(self, num_rows: int) -> None:
        """Begin a step of ``num_rows`` rows. Raises StepError before `join`."""
        if not self.joined:
            raise StepError(f"rank {self.shard.rank} of {self.shard.world_size} has not joined the others")
        self.num_rows = num_rows

    def add(self, partial: torch.Tensor) -> torch.Tensor:
        """Return [..., rows, width] summed over all ranks. Padding copies of the last row are not sent."""
        rows = partial.shape[-2]
        real = rows if self.num_rows is None else min(rows, self.num_rows)
        total = self._collective.all_reduce(partial[..., :real, :].contiguous())
        if real == rows:
            return total
        return torch.cat((total, total[..., -1:, :].expand(*total.shape[:-2], rows - real, -1)), dim=-2)

    def gather(self, part: torch.Tensor, width: int) -> torch.Tensor:
        """Return all ``width`` columns on rank 0, and the rank's own ``part`` [rows, columns] on others."""
        parts = self._collective.gather(part.contiguous())
        return part if parts is None else torch.cat(parts, dim=-1)[:, :width]


class PartialSum(nn.Module):
    """Compute this rank's part of a sum, and pass on the whole sum.

    ``part`` is a linear with its inputs divided between ranks, or a layer's experts. Only rank 0's part
    has a bias.
    """

    def __init__(self, part: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.part = part
        self._ranks = ranks

    def forward(self, *args: Any) -> torch.Tensor:
        """Return [..., rows, hidden] for the arguments that ``part`` takes."""
        return self._ranks.add(self.part(*args))
