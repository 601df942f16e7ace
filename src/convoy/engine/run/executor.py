"""The two seams below the engine: an `Executor` runs steps, and a `Recovery` brings another after a loss.

`submit` starts a step, `collect` brings back the oldest. The engine does not know where a step runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from convoy.engine.kv.limits import SchedulerLimits
from convoy.errors import ConvoyError, StageLost
from convoy.model.sampling.output_rows import SampleJob, SampleResult
from convoy.transport.link.link import Link, Received
from convoy.wire.messages.control import Step

# Shape [layers, 2 (K, then V), positions, kv_heads, head_dim].
Kv = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Hold one sampling result for each output of the rows, in row order: as many as there were jobs."""

    number: int
    outcomes: tuple[SampleResult, ...]


class Executor(Protocol):
    """Run steps strictly in the order of their submission.

    One thread submits and collects. Receiver threads of links call `deliver` and `lost`.
    """

    @property
    def depth(self) -> int:
        """Return how many steps may be in flight at once."""

    @property
    def feeds(self) -> bool:
        """Return whether a step may have `FED` tokens."""

    @property
    def oldest(self) -> int | None:
        """Return the number of the step that `collect` waits for, or None."""

    @property
    def suspects(self) -> tuple[str, ...]:
        """Return the members that failed first; two if it may have been either, none if unknown."""

    def submit(self, step: Step, jobs: Sequence[SampleJob]) -> None:
        """Start a step; ``jobs`` has one sampling job for each output of its rows.

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

    def deliver(self, link: Link, received: Received) -> None:
        """Take a message or a tensor of another member of the plan."""

    def lost(self, link: Link, error: ConvoyError) -> None:
        """End all waits, because the link of a member of the plan ended."""

    def close(self) -> None:
        """End the executor; a `collect` that waits on another thread raises."""


@dataclass(frozen=True, slots=True)
class NewStages:
    """Hold the stages that replace lost ones; they know no sequence yet.

    With ``without_loss``, the stages failed although no member was lost, so a request in flight may be the
    cause.
    ``failed_at`` is the member of the failed stage; it is None if unknown, or if one of two may have failed.
    With ``same_bits``, they compute the same bits as the previous stages. Otherwise another token may win
    where the two best are closer than ``near_tie``, in log-probabilities, or than `NEAR_TIE`.
    """

    executor: Executor
    limits: SchedulerLimits
    max_context: int
    without_loss: bool = False
    failed_at: str | None = None
    same_bits: bool = True
    near_tie: float = 0.0


@dataclass(frozen=True, slots=True)
class Replan:
    """Ask for new stages although nothing is lost: nothing runs, and there may be better stages now.

    ``why`` is the reason. Clients may read it.
    """

    why: str


class Recovery(Protocol):
    """Find other stages. The engine calls it on its own thread, without its lock."""

    def recover(self, error: StageLost) -> NewStages | None:
        """Return other stages, or None if nothing was lost and the steps in flight may still come back.

        The call may take as long as members may be waited for. Raises `StageLost` if no stages were found in
        that time; the engine then asks again at once with that error, and the next call pauses before it
        answers. Any other `ConvoyError` is final.
        """

    def replan(self, request: Replan) -> NewStages | None:
        """Return better stages, or None if there are none; the present ones go on then.

        Raises as `recover` does, once the present stages are given up.
        """

    def state(self) -> str:
        """Return the progress in a few words, from any thread.

        Clients read them, so no peer may write any.
        """

    def cancel(self) -> None:
        """Make `recover` raise soon, now and from now on; from any thread."""
