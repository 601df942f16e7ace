"""What the ranks of a stage do together: add up what each has computed of a whole, and gather parts.

A collective's own matter, how partial sums travel, lies in `engine.collective`; a stage only calls it, at the
same places in the same order on every rank.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Collective(Protocol):
    """The ranks of one stage. After an error it is over."""

    @property
    def rank(self) -> int:
        """This one's place, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """How many there are."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, of the shape of ``x``, the same bits on each of them.

        Added in the order of ranks, ((p0 + p1) + p2) + ..., so that it does not depend on timing. ``x`` is
        contiguous, and may be written over. Raises CollectiveError.
        """
        ...

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """On rank 0 every rank's ``x``, all of one shape, in the order of ranks; None on the others.

        Raises CollectiveError.
        """
        ...


class Alone:
    """The only rank there is; or one whose sums are taken for the whole, to try a stage out by itself."""

    rank = 0
    world_size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """``x``"""
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """``x`` alone."""
        return [x]
