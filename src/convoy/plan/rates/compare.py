"""Predicted rates of every way to share a model among members, and the gain of tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from convoy.plan.placement.modes import ModePlacements
from convoy.plan.placement.placement import Placement
from convoy.plan.rates.rates import (
    Links,
    RatesReport,
    StepLoad,
    Workload,
    all_reduce_s,
    num_all_reduces,
    predict,
    summing_s,
)
from convoy.plan.speed import Speed


class TensorReport(msgspec.Struct, frozen=True):
    """Report the seconds that ranks pay and save for a decode step of one sequence when they share layers.

    They are faster than the pipeline if an all-reduce takes less than ``crossover_s``; below 0 they never
    are.
    """

    world_size: int
    # Of a step.
    num_all_reduces: int
    all_reduce_bytes: int
    all_reduce_s: float
    paid_s: float
    # Of the pipeline's step.
    saved_s: float
    crossover_s: float


@dataclass(frozen=True)
class Compared:
    """Hold the rates of each mode, or the reason why there are none."""

    rates: dict[str, RatesReport]
    refused: dict[str, str]
    tensor: TensorReport | None


def compare(modes: ModePlacements, speeds: Mapping[str, Speed], links: Links, workload: Workload) -> Compared:
    """Compare the placements of ``modes``. ``speeds`` has every member; a lone member has no other modes."""
    placements = modes.placements
    rates = {mode: predict(placement, speeds, links, workload) for mode, placement in placements.items()}
    tensor = None
    if "tensor" in rates and "pipeline" in rates:
        saved_s = rates["pipeline"].decode.step_s - rates["tensor"].decode.step_s
        tensor = _tensor(placements["tensor"], links, workload, saved_s)
    refused = {str(mode): error.message for mode, error in modes.refused.items()}
    if modes.facts.model is not None:
        refused.setdefault("tensor", modes.facts.model)
    return Compared({str(mode): rate for mode, rate in rates.items()}, refused, tensor)


def _tensor(placement: Placement, links: Links, workload: Workload, faster_s: float) -> TensorReport:
    """Return the report; ``faster_s`` is the time saved against the pipeline's step, sums included."""
    spec, load = placement.spec, StepLoad(1, workload.context)
    shared = [stage for stage in placement.stages if stage.world_size > 1]
    count = sum(num_all_reduces(stage) for stage in shared)
    each_s = max(all_reduce_s(stage.holders, links, 4 * spec.hidden_size) for stage in shared)
    paid_s = sum(summing_s(spec, stage, links, load) for stage in shared)
    saved_s = faster_s + paid_s
    gathering_s = paid_s - count * each_s
    return TensorReport(
        world_size=max(stage.world_size for stage in shared),
        num_all_reduces=count,
        all_reduce_bytes=4 * spec.hidden_size,
        all_reduce_s=each_s,
        paid_s=paid_s,
        saved_s=saved_s,
        crossover_s=(saved_s - gathering_s) / count,
    )
