"""Connect a stage on MLX to the other ranks that hold it: partial sums leave MLX, and come back as sums.

The collective adds torch tensors over sealed links, in the order of ranks. So a sum ends an evaluation. It is
apart from `stage` because a stage of one member needs none of it.
"""

from __future__ import annotations

import mlx.core as mx
import torch

from convoy.model.backends.mlx.arrays import to_mlx, to_torch
from convoy.model.backends.mlx.layers.matrices import Matrix
from convoy.model.collective import Collective
from convoy.model.parallel.ranks import Ranks
from convoy.plan.spec.sharding import WHOLE, Shard


class MlxRanks:
    """Hold the connection of one rank. The stage's own thread adds; any other may join or leave before."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self._ranks = None if shard == WHOLE else Ranks(shard)

    def join(self, collective: Collective) -> None:
        """Use ``collective`` from now on. Raises ModelError for another rank's collective."""
        (self._ranks or Ranks(self.shard)).join(collective)

    def leave(self) -> None:
        """Disconnect from the other ranks."""
        if self._ranks is not None:
            self._ranks.leave()

    def begin(self, num_rows: int) -> None:
        """Begin a step. Raises StepError before `join`."""
        if self._ranks is not None:
            self._ranks.begin(num_rows)

    def add(self, partial: mx.array) -> mx.array:
        """Return the sum of all ranks' ``partial`` [rows, width], added in float32 and rounded once."""
        if self._ranks is None:
            return partial
        return to_mlx(self._ranks.add(to_torch(partial)))

    def gather(self, part: torch.Tensor, width: int) -> torch.Tensor:
        """Return all ``width`` columns on rank 0, and ``part`` on others."""
        return part if self._ranks is None else self._ranks.gather(part, width)

    def look_up(self, table: Matrix, tokens: mx.array, dtype: mx.Dtype) -> mx.array:
        """Return the rows of ``tokens``. One rank has a row and the others zeros, so a sum has its bits."""
        if self._ranks is None:
            return table.rows(tokens).astype(dtype)
        num_rows = table.arrays[0].shape[0]
        own = tokens - self.shard.rank * num_rows
        is_own = (own >= 0) & (own < num_rows)
        rows = table.rows(mx.where(is_own, own, 0)).astype(dtype)
        return self.add(mx.where(is_own[:, None], rows, mx.zeros((), dtype)))
