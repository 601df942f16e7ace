"""How a step gets run: `submit` starts it, `collect` brings back the oldest.

The engine does not know where.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from convoy.wire.messages import Step


@dataclass(frozen=True, slots=True)
class StepResult:
    """``logits`` is float32 [sum of the rows' num_outputs, vocabulary], in row order."""

    number: int
    logits: npt.NDArray[np.float32]


class Executor(Protocol):
    """Runs steps strictly in the order of their submission."""

    @property
    def depth(self) -> int:
        """How many steps may be in flight at once."""

    def submit(self, step: Step) -> None:
        """Start a step. Raises `StageLost` if a stage is gone, `StepError` if it makes no sense."""

    def collect(self) -> StepResult:
        """Wait, bounded, for the oldest step in flight. Raises `StageLost`."""

    def close(self) -> None:
        """End it; a `collect` that waits elsewhere raises."""
