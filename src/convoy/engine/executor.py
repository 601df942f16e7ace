"""How a step gets run: `submit` starts it, `collect` brings back the oldest.

The engine does not know where.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from convoy.model.draw import Draw, Outcome
from convoy.wire.messages import Step

MAX_IN_FLIGHT = 64  # steps, at most: what a stage lets wait, and a link's inbox holds


@dataclass(frozen=True, slots=True)
class StepResult:
    """One outcome per output of the rows, in row order: as many as there were draws."""

    number: int
    outcomes: tuple[Outcome, ...]


class Executor(Protocol):
    """Runs steps strictly in the order of their submission."""

    @property
    def depth(self) -> int:
        """How many steps may be in flight at once."""

    def submit(self, step: Step, draws: Sequence[Draw]) -> None:
        """Start a step. ``draws``: what to do with each output of its rows.

        Raises `StageLost` if a stage is gone, `StepError` if it makes no sense.
        """

    def collect(self) -> StepResult:
        """Wait, bounded, for the oldest step in flight. Raises `StageLost`."""

    def close(self) -> None:
        """End it; a `collect` that waits elsewhere raises."""
