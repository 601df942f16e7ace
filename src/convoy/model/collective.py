"""Define the operations that the ranks of a stage do together: sum partial results and gather parts.

`engine.ranks.sums` implements how partial sums travel. A stage only calls these operations, at the same
places and in the same order on every rank.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Collective(Protocol):
    """Join the ranks of one stage. After an error it cannot be used again."""

    @property
    def rank(self) -> int:
        """Return this rank's place, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, of the shape of ``x``, with the same bits on each of them.

        Terms are added in the order of ranks, ((p0 + p1) + p2) + ..., so the result does not depend on
        timing. ``x`` is contiguous and may be overwritten. Raises CollectiveError.
        """
        ...

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """Return every rank's ``x``, all of one shape, in the order of ranks; None on all ranks but 0.

        Raises CollectiveError.
        """
        ...


class Alone:
    """Represent the only rank, or one rank that runs alone for a trial, with its partial sums as totals."""

    rank = 0
    world_size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``."""
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """Return ``x`` alone."""
        return [x]
