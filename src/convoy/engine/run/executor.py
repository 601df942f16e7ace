"""How a step gets run: `submit` starts it, `collect` brings back the oldest.

The engine does not know where.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from convoy.model.sampling.output_rows import SampleJob, SampleResult
from convoy.wire.messages.control import Step

Kv = npt.NDArray[np.float32]  # [layers, 2 (K, then V), positions, kv_heads, head_dim]

MAX_IN_FLIGHT = 64  # steps, at most: what a stage lets wait, and a link's inbox holds


@dataclass(frozen=True, slots=True)
class StepResult:
    """One outcome per output of the rows, in row order: as many as there were draws."""

    number: int
    outcomes: tuple[SampleResult, ...]


class Executor(Protocol):
    """Runs steps strictly in the order of their submission."""

    @property
    def depth(self) -> int:
        """How many steps may be in flight at once."""

    def submit(self, step: Step, draws: Sequence[SampleJob]) -> None:
        """Start a step. ``draws``: what to do with each output of its rows.

        Raises `StageLost` if a stage is gone, or the head's own cannot run it.
        """

    def collect(self) -> StepResult:
        """Wait, bounded, for the oldest step in flight. Raises `StageLost`."""

    def read_blocks(self, start: int, end: int, blocks: Sequence[int]) -> Kv:
        """The K/V of ``blocks`` in layers [start, end), wherever these are; while no step is in flight.

        Raises `StageLost`, and `StepError` for what there is not, or what is too much at once.
        """

    def write_blocks(self, start: int, blocks: Sequence[int], tags: Sequence[bytes], kv: Kv) -> None:
        """Fill ``blocks``, which no sequence has, in layers from ``start`` on: after the last of all layers,
        which come in order, they hold the prefixes of ``tags``.

        Raises as `read_blocks`; then they hold nothing that may be shared.
        """

    def close(self) -> None:
        """End it; a `collect` that waits elsewhere raises."""
