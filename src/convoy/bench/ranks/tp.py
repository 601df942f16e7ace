"""Compare the modes of `convoy bench tp`: one member, a pipeline of two, and two ranks on every layer.

bench/METHODOLOGY.md explains the figures and their limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from convoy.bench.report.report import DecodeRow
from convoy.plan.offer import MemberOffer
from convoy.plan.placement.modes import find_placements
from convoy.plan.rates.compare import Compared, compare
from convoy.plan.rates.rates import Links, Workload
from convoy.plan.spec.model import ModelSpec
from convoy.plan.speed import Speed

SINGLE, PIPELINE, TENSOR = "single", "pipeline", "tensor"
MODES = (SINGLE, PIPELINE, TENSOR)
_ROOM = 1 << 62
# Bytes per second. The measured time of an all-reduce already includes sending.
_INSTANT = 1e15


@dataclass(frozen=True, slots=True)
class ModeRow:
    """Hold the rate of ``concurrent`` requests that decode at once: the median of all windows.

    ``single`` has one member's cores. ``predicted_tokens_per_s`` is the rate that `convoy plan` would show,
    from this machine's speed and the measured all-reduce.
    """

    mode: str
    concurrent: int
    context_tokens: int
    tokens_per_s: float
    ms_per_token: float
    predicted_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class TpMachine:
    """Hold the inputs of a prediction: a member's speed, and the seconds of an all-reduce of one row."""

    spec: ModelSpec
    kernel: str
    speed: Speed
    all_reduce_s: float

    def predict(self, context: int, concurrent: int) -> Compared:
        """Predict the rates of one member, and of two that are alike."""
        offers = [MemberOffer(name, _ROOM, name == "alpha", kernel=self.kernel) for name in ("alpha", "beta")]
        speeds = {offer.name: self.speed for offer in offers}
        links = Links(2 * self.all_reduce_s, _INSTANT)
        load = Workload(min(context, self.spec.max_context), concurrent)
        return compare(find_placements(self.spec, offers, ranks=2), speeds, links, load)


def mode_row(mode: str, row: DecodeRow, machine: TpMachine) -> ModeRow:
    """Return a measured row with its prediction."""
    found = machine.predict(row.context_tokens, row.concurrent).rates[mode]
    rate = found.decode if row.concurrent == 1 else found.decode_batch
    return ModeRow(
        mode,
        row.concurrent,
        row.context_tokens,
        row.tokens_per_s,
        row.ms_per_token,
        round(rate.tokens_per_s, 2),
    )


def ratios_of(rows: Sequence[ModeRow], machine: TpMachine) -> Mapping[str, float]:
    """Return tensor's rate over the others', by number of requests, and the break-even time of an all-reduce.

    ``crossover_us`` is predicted for one request: tensor pays below it. ``crossover_measured_us`` follows
    from the measured difference, if there is one. The other ratios are of measured rates too.
    """
    rate = {(row.mode, row.concurrent): row.tokens_per_s for row in rows}
    found = {
        f"tensor_over_{other}_{count}": round(rate[TENSOR, count] / rate[other, count], 3)
        for other in (SINGLE, PIPELINE)
        for count in sorted({row.concurrent for row in rows})
        if {(TENSOR, count), (other, count)} <= rate.keys()
    }
    lone = next((row for row in rows if row.concurrent == 1), None)
    if lone is None:
        return found
    tensor = machine.predict(lone.context_tokens, 1).tensor
    assert tensor is not None
    found |= {
        "num_all_reduces": tensor.num_all_reduces,
        "crossover_us": round(tensor.crossover_s * 1e6, 1),
    }
    if not {(PIPELINE, 1), (TENSOR, 1)} <= rate.keys():
        return found
    # Tensor breaks even where its all-reduces take up all the time that it saves over a pipeline.
    saved_s = 1 / rate[PIPELINE, 1] - 1 / rate[TENSOR, 1]
    measured_s = machine.all_reduce_s + saved_s / tensor.num_all_reduces
    return {**found, "crossover_measured_us": round(measured_s * 1e6, 1)}
