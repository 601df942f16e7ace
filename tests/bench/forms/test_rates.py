"""Rates in turn: every way has a turn in every round, and is compared with the same round of another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from convoy.bench.forms.rates import DECODE, PREFILL, RateOptions, Rates, StageRates, Way, take_turns
from convoy.bench.report.clock import Deadline
from convoy.errors import ConvoyError
from convoy.model.checkpoints.source import ModelSource
from support.synthetic import write_config


def counted(turns: list[str], name: str, *rates: float) -> Callable[[], Rates]:
    left = iter(rates)

    def measure() -> Rates:
        turns.append(name)
        return {(DECODE, 1): next(left)}

    return measure


def test_ways_take_turns_and_are_compared_round_by_round() -> None:
    turns: list[str] = []
    other = Way("Q4_0", "llama.cpp", 1, counted(turns, "theirs", 10.0, 100.0, 1.0))
    own = Way("Q4_0", "stage", 1, counted(turns, "ours", 20.0, 300.0, 5.0), over=other)
    last = Way("F32", "stage", 1, counted(turns, "last", 1.0, 1.0, 1.0), over=own)
    said: list[str] = []
    rows = take_turns([other, own, last], 3, Deadline(60), said.append)
    assert turns == ["theirs", "ours", "last"] * 3
    assert [(row.tokens_per_s, row.times, row.over) for row in rows] == [
        (10.0, 0.0, ""),
        (20.0, 3.0, "llama.cpp"),
        (1.0, 0.05, "Q4_0 through stage"),
    ]
    assert said[1] == "round 1 of 3, Q4_0 through stage: decode 1: 20.0 tokens/s"


def test_a_late_run_ends_with_an_error() -> None:
    with pytest.raises(ConvoyError, match="longer than 0 s"):
        take_turns([Way("F32", "stage", 1, dict)], 1, Deadline(0), print)


def test_a_stage_measures_the_prompt_and_each_count_again_in_every_round(tmp_path: Path) -> None:
    source = ModelSource.resolve(f"synthetic:{write_config(tmp_path)}")
    options = RateOptions((1, 3), context=5, prompt_tokens=300, steps=2, rounds=2)
    stage = StageRates(source, "exact-f32", 1, options)
    first, second = stage.measure(), stage.measure()
    assert list(first) == list(second) == [(PREFILL, 300), (DECODE, 1), (DECODE, 3)]
    assert all(rate > 0 for rate in (*first.values(), *second.values()))
    assert stage.resident_bytes == source.spec.weight_bytes(
        0, source.spec.num_layers, embed=True, output=True, dtype="exact-f32"
    )
