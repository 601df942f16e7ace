"""The mode in which members share a model: alone, in a pipeline, or several on every layer; and the reason.

The rule follows the lineage's, with two changes. A request for tensor parallelism gets it or an error.
Without a request, a cluster takes it only if the predicted step is faster, and never under a kernel that
promises the same bits over every cut: partial sums are added in another order than one process adds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from convoy.config.kernels import MLX_KERNELS, STEADY
from convoy.config.table import Parallel
from convoy.errors import PlanError

Asked = Parallel
Mode = Literal["single", "pipeline", "tensor"]
ASKED: tuple[Asked, ...] = get_args(Asked)


@dataclass(frozen=True, slots=True)
class PredictedSteps:
    """Hold the seconds of one sequence's decode step in each mode, see `plan.rates.rates`."""

    pipeline_s: float
    tensor_s: float


@dataclass(frozen=True, slots=True)
class ParallelFacts:
    """Hold the facts that the choice depends on.

    ``world_size`` is that of the largest number of ranks that the members can form. The reasons against
    tensor parallelism are None if there is none: ``model``, it has no plan or its heads do not divide;
    ``room``, a rank's slice fits no member, or a rule forbids it; ``collective``, it did not come up.
    ``steps`` is None without measurements.
    """

    num_members: int
    world_size: int
    kernel: str
    model: str | None = None
    room: str | None = None
    collective: str | None = None
    steps: PredictedSteps | None = None


@dataclass(frozen=True, slots=True)
class ParallelChoice:
    """Hold the mode and its ``reason``: one clause for people, in lower case."""

    mode: Mode
    reason: str


def choose_parallel(asked: Asked, facts: ParallelFacts) -> ParallelChoice:
    """Return the first row that applies, see docs/tensor-parallel.md.

    Raises PlanError if tensor parallelism was asked for and is impossible: it is never replaced in silence.
    """
    if asked == "single":
        return ParallelChoice(asked, "asked for: single")
    if facts.num_members < 2:
        return ParallelChoice("single", "there is one member, so no other to share layers with")
    if asked == "pipeline":
        return ParallelChoice(asked, "asked for: pipeline")
    against = why_not_tensor(facts)
    if asked == "tensor":
        if against is not None:
            raise PlanError(
                f"tensor parallelism was asked for, and cannot be: {against}",
                hint="with --parallel auto or pipeline the members hold whole layers, one after the other",
            )
        return ParallelChoice("tensor", "asked for: tensor")
    if against is None:
        against = _why_not_by_itself(facts)
    if against is not None:
        return ParallelChoice("pipeline", against)
    assert facts.steps is not None
    return ParallelChoice("tensor", f"predicted faster: {_compared(facts.steps)}")


def why_not_tensor(facts: ParallelFacts) -> str | None:
    """Return the reason that makes tensor parallelism impossible, or None."""
    if facts.model is not None:
        return facts.model
    if facts.world_size < 2:
        return f"the {facts.num_members} members make no group of 2 ranks"
    return facts.room or (
        None if facts.collective is None else f"the collective did not come up: {facts.collective}"
    )


def _why_not_by_itself(facts: ParallelFacts) -> str | None:
    """Return the reason against possible tensor parallelism that was not asked for, or None."""
    if facts.kernel in STEADY:
        return (
            f"{facts.kernel} promises the same bits over every cut, and tensor parallelism does not "
            "(--parallel tensor allows it)"
        )
    if facts.kernel in MLX_KERNELS:
        return "ranks on MLX were not measured on any Mac (--parallel tensor allows them)"
    if facts.steps is None:
        return "nothing was measured to predict a step of tensor parallelism from"
    if facts.steps.tensor_s >= facts.steps.pipeline_s:
        return f"predicted faster than tensor parallelism: {_compared(facts.steps)}"
    return None


def _compared(steps: PredictedSteps) -> str:
    return f"a step takes {steps.tensor_s * 1e3:.1f} ms as tensor, {steps.pipeline_s * 1e3:.1f} as pipeline"
