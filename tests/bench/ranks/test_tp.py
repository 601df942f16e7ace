"""What the bench of ranks says of what it measured, with numbers that a person can check."""

from __future__ import annotations

import pytest

from convoy.bench.ranks.tp import MODES, ModeRow, TpMachine, mode_row, ratios_of
from convoy.bench.report.report import DecodeRow
from convoy.plan.speed import Speed
from plan.placement.test_placement import spec_of

SPEC = spec_of(num_layers=4)
SUMS = 2 * 4 + 1


def machine(all_reduce_s: float) -> TpMachine:
    return TpMachine(SPEC, "plain-f32", Speed(1e9, 1e12), all_reduce_s)


def row(mode: str, count: int, rate: float) -> ModeRow:
    return ModeRow(mode, count, 64, rate, 1000 * count / rate, 0.0)


def test_a_row_has_what_was_predicted_for_its_mode() -> None:
    free = {mode: mode_row(mode, DecodeRow(1, 1, 64, 10.0, 100.0), machine(1e-9)) for mode in MODES}
    single, tensor = (free[mode].predicted_tokens_per_s for mode in ("single", "tensor"))
    assert tensor == pytest.approx(2 * single, rel=0.02)
    assert free["pipeline"].predicted_tokens_per_s <= single * 1.001
    dear = mode_row("tensor", DecodeRow(1, 1, 64, 10.0, 100.0), machine(1e-3))
    assert 1 / dear.predicted_tokens_per_s == pytest.approx(1 / tensor + (SUMS + 1) * 1e-3, rel=0.01)
    many = mode_row("tensor", DecodeRow(2, 8, 64, 10.0, 100.0), machine(1e-9))
    assert many.predicted_tokens_per_s > tensor


def test_ratios_are_of_tensor_over_the_others_for_each_count() -> None:
    rows = [row("single", 1, 10), row("pipeline", 1, 9), row("tensor", 1, 15)]
    rows += [row("single", 8, 40), row("pipeline", 8, 60), row("tensor", 8, 50)]
    found = ratios_of(rows, machine(1e-4))
    assert found["tensor_over_single_1"] == 1.5
    assert found["tensor_over_single_8"] == 1.25
    assert found["tensor_over_pipeline_8"] == pytest.approx(5 / 6, abs=1e-3)
    assert found["num_all_reduces"] == SUMS
    # with that many microseconds more for each, both would have taken as long
    slower_s = 1 / 15 + SUMS * (found["crossover_measured_us"] / 1e6 - 1e-4)
    assert slower_s == pytest.approx(1 / 9, rel=1e-3)


def test_without_a_lone_request_there_is_no_crossover() -> None:
    rows = [row(mode, 8, 10) for mode in MODES]
    assert ratios_of(rows, machine(1e-4)).keys() == {"tensor_over_single_8", "tensor_over_pipeline_8"}


def test_what_was_not_measured_is_in_no_ratio() -> None:
    rows = [row(mode, 1, rate) for mode, rate in (("single", 10), ("tensor", 14))]
    found = ratios_of(rows, machine(1e-4))
    assert found.keys() == {"tensor_over_single_1", "num_all_reduces", "crossover_us"}
    assert found["tensor_over_single_1"] == 1.4
