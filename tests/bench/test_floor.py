"""A step beside what the memory allows: the figures follow from each other, and the run ends when told to."""

from __future__ import annotations

from pathlib import Path

import pytest

from convoy.bench.floor import FloorOptions, FloorRow, MemoryRead, floor_ratios, load_whole, measure_floor
from convoy.bench.masks import mask_ratios, measure_masks
from convoy.bench.report.clock import Deadline
from convoy.errors import ConvoyError
from convoy.model.checkpoints.source import ModelSource
from convoy.model.text.tokens import Tokenizer
from support.synthetic import write_config

OPTIONS = FloorOptions((1, 2), context=20, steps=3)


def test_every_count_has_steps_and_every_shape_a_row(tmp_path: Path) -> None:
    source = ModelSource.resolve(f"synthetic:{write_config(tmp_path)}")
    stage = load_whole(source, "exact-f32", 1)
    said: list[str] = []
    rows, linears = measure_floor(stage, OPTIONS, MemoryRead(Deadline(60), 1 << 16), said.append)
    assert [row.concurrent for row in rows] == [1, 2]
    assert len(said) == 2
    embedding = 4 * source.spec.vocab_size * source.spec.hidden_size
    for row in rows:
        assert row.step_bytes == stage.weight_bytes - embedding
        assert row.floor_ms == pytest.approx(row.step_bytes / row.read_gb_per_s / 1e6, rel=0.05)
        assert row.tokens_per_s == pytest.approx(1000 * row.concurrent / row.step_ms, rel=0.05)
        assert 0 < row.of_floor < 1
    assert {linear.concurrent for linear in linears} == {1, 2}
    shapes = [(linear.inputs, linear.outputs) for linear in linears if linear.concurrent == 1]
    assert (source.spec.hidden_size, source.spec.vocab_size) in shapes
    assert sum(linear.number for linear in linears if linear.concurrent == 1) == len(stage.linears)


def test_a_late_run_ends_with_an_error() -> None:
    with pytest.raises(ConvoyError, match="longer than 0 s"):
        MemoryRead(Deadline(0), 1 << 16).beside(lambda: None, 1)


def test_ratios_are_those_of_the_rows_that_are_there() -> None:
    def row(kernel: str, count: int, ms: float) -> FloorRow:
        return FloorRow(kernel, count, 100, 1000, 20.0, 30.0, ms, 1000 * count / ms, 30 / ms)

    rows = [row("exact-f32", 1, 40.0), row("exact-f32", 4, 50.0), row("int8-q8", 16, 30.0)]
    assert floor_ratios(rows) == {"exact-f32_of_floor": 0.75, "exact-f32_step_4_over_1": 1.25}


def test_masks_have_a_row_beside_each_step_and_a_late_run_ends() -> None:
    source = ModelSource.resolve("demo-mini")
    floors = [FloorRow("exact-f32", count, 100, 1000, 20.0, 30.0, 40.0, 25.0, 0.7) for count in (1, 3)]
    rows = measure_masks(Tokenizer(source), floors, 5, Deadline(60))
    assert [(row.concurrent, row.vocab_size) for row in rows] == [
        (one, source.spec.vocab_size) for one in (1, 3)
    ]
    assert all(row.mask_ms > 0 and row.of_step == pytest.approx(row.mask_ms / 40, abs=1e-3) for row in rows)
    assert mask_ratios(rows).keys() == {"exact-f32_masks_of_step_1", "exact-f32_masks_of_step_3"}
    with pytest.raises(ConvoyError, match="longer than 0 s"):
        measure_masks(Tokenizer(source), floors, 5, Deadline(0))
