"""The Protocol that runs steps: `submit` starts one, `collect` brings back the oldest.

The engine does not know where a step runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from convoy.model.sampling.output_rows import SampleJob, SampleResult
from convoy.wire.messages.control import Step

# Shape [layers, 2 (K, then V), positions, kv_heads, head_dim].
Kv = npt.NDArray[np.float32]

# The most steps that a stage lets wait, and that a link's inbox holds.
MAX_IN_FLIGHT = 64


@dataclass(frozen=True, slots=True)
class StepResult:
    """Hold one sampling result for each output of the rows, in row order: as many as there were jobs."""

    number: int
    outcomes: tuple[SampleResult, ...]


class Executor(Protocol):
    """Run steps strictly in the order of their submission."""

    @property
    def depth(self) -> int:
        """Return how many steps may be in flight at once."""

    def submit(self, step: Step, draws: Sequence[SampleJob]) -> None:
        """Start a step; ``draws`` has one sampling job for each output of its rows.

        Raises `StageLost` if a stage is gone, or if the head's own stage cannot run it.
        """

    def collect(self) -> StepResult:
        """Wait, bounded, for the oldest step in flight. Raises `StageLost`."""

    def read_blocks(self, start: int, end: int, blocks: Sequence[int]) -> Kv:
        """Return the K/V of ``blocks`` in layers [start, end) from all their stages.

        No step may be in flight. Raises `StageLost`, and `StepError` for blocks or layers that do not exist,
        or for too many at once.
        """

    def write_blocks(self, start: int, blocks: Sequence[int], tags: Sequence[bytes], kv: Kv) -> None:
        """Fill free ``blocks`` with K/V in the layers from ``start`` on.

        The layers come in order. After the last of them, the blocks hold the prefixes of ``tags``. Raises as
        `read_blocks` does; the blocks then hold nothing that may be shared.
        """

    def close(self) -> None:
        """End the executor; a `collect` that waits on another thread raises."""
