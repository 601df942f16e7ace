"""What `convoy bench tp` found: one member, a pipeline of two, and two ranks on every layer.

bench/METHODOLOGY.md says what the figures mean and what they do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from convoy.bench.report.report import DecodeRow
from convoy.plan.offer import MemberOffer
from convoy.plan.placement.ways import find_ways
from convoy.plan.rates.compare import Compared, compare
from convoy.plan.rates.rates import Links, Workload
from convoy.plan.spec.model import ModelSpec
from convoy.plan.speed import Speed

SINGLE, PIPELINE, TENSOR = "single", "pipeline", "tensor"
MODES = (SINGLE, PIPELINE, TENSOR)
_ROOM = 1 << 62
_INSTANT = 1e15  # bytes a second: what was measured has the sending in it


@dataclass(frozen=True, slots=True)
class ModeRow:
    """``concurrent`` requests decode at once; the median of all windows. ``single`` has one member's cores.

    ``predicted_tokens_per_s`` is what `convoy plan` would say, from this machine's speed and the all-reduce
    that was measured.
    """

    mode: str
    concurrent: int
    context_tokens: int
    tokens_per_s: float
    ms_per_token: float
    predicted_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class TpMachine:
    """What rates are predicted from: a member's speed, and seconds of an all-reduce of one row."""

    spec: ModelSpec
    kernel: str
    speed: Speed
    all_reduce_s: float

    def predict(self, context: int, concurrent: int) -> Compared:
        """Of one member, and of two that are alike."""
        offers = [MemberOffer(name, _ROOM, name == "alpha", kernel=self.kernel) for name in ("alpha", "beta")]
        speeds = {offer.name: self.speed for offer in offers}
        links = Links(2 * self.all_reduce_s, _INSTANT)
        load = Workload(min(context, self.spec.max_context), concurrent)
        return compare(find_ways(self.spec, offers, ranks=2), speeds, links, load)


def mode_row(mode: str, row: DecodeRow, machine: TpMachine) -> ModeRow:
    """A measured row with what was predicted for it."""
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
    """Tensor over the others, by count of requests; and the all-reduce below which it pays for one request.

    ``crossover_us`` is predicted, ``crossover_measured_us`` from the difference between what was measured,
    if that was. Other ratios are of what was measured too.
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
    saved_s = 1 / rate[PIPELINE, 1] - 1 / rate[TENSOR, 1]
    measured_s = machine.all_reduce_s + saved_s / tensor.num_all_reduces
    return {**found, "crossover_measured_us": round(measured_s * 1e6, 1)}
