"""A bench of a real engine counts what the engine did, and ends when it was told to."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from convoy.bench.bare import BLOCK_SIZE
from convoy.bench.report.clock import Deadline
from convoy.bench.report.machine import Watch
from convoy.bench.report.report import (
    RING,
    STAGE,
    STAGES,
    DecodeRow,
    PrefillRow,
    Report,
    StepRow,
    decode_ratios,
    hop_ratios,
    prefill_ratios,
)
from convoy.bench.throughput import (
    DecodeOptions,
    PrefillOptions,
    measure_decode,
    measure_prefill,
)
from convoy.engine.engine import Engine, EngineOptions
from convoy.engine.run.local import LocalExecutor
from convoy.engine.scheduler import GroupLimits, SchedulerLimits
from convoy.errors import ConvoyError
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.stage import StageOptions
from convoy.model.text.tokens import Tokenizer
from convoy.wire.messages.control import StageAssignment
from support.synthetic import write_config

OPTIONS = DecodeOptions((1, 2, 4), context=20, num_windows=3, window_tokens=4)


@contextmanager
def engine_of(tmp_path: Path, num_blocks: int) -> Iterator[Engine]:
    source = ModelSource.resolve(f"synthetic:{write_config(tmp_path)}")
    assignment = StageAssignment("alone", 0, source.spec.num_layers, embed=True, output=True)
    stage = HostStage.load(source, assignment, StageOptions(num_threads=1, kernel="plain-f32"))
    stage.make_pools(num_blocks)
    limits = SchedulerLimits((GroupLimits(num_blocks),), BLOCK_SIZE)
    options = EngineOptions(max_context=source.spec.max_context)
    engine = Engine(LocalExecutor(stage), Tokenizer(source), limits, options)
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


def test_decode_has_a_row_for_each_count_and_leaves_nothing_running(tmp_path: Path) -> None:
    said: list[str] = []
    with engine_of(tmp_path, OPTIONS.num_blocks) as engine:
        rows = measure_decode(engine, 301, 1, OPTIONS, deadline=Deadline(60), say=said.append)
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.preempted) == (0, 0, 0)
    assert [row.concurrent for row in rows] == [1, 2, 4]
    for row in rows:
        assert row.tokens_per_s > 0
        assert row.ms_per_token == pytest.approx(1000 * row.concurrent / row.tokens_per_s, rel=0.01)
        assert row.context_tokens <= OPTIONS.context + OPTIONS.max_tokens
    assert len(said) == 4


def test_prefill_is_the_time_to_the_first_token(tmp_path: Path) -> None:
    with engine_of(tmp_path, 64) as engine:
        options = PrefillOptions(num_tokens=200, chunk=64, window=1, num_rounds=3)
        row = measure_prefill(engine, 301, 1, options, deadline=Deadline(60), say=lambda _text: None)
        assert engine.stats().prompt_tokens == 3 * (200 + 264)
    assert row.tokens_per_s == pytest.approx(200 / row.seconds, rel=0.05)


def test_the_next_turn_of_a_prompt_runs_only_what_is_new(tmp_path: Path) -> None:
    with engine_of(tmp_path, 64) as engine:
        options = PrefillOptions(num_tokens=200, chunk=64, window=1, num_rounds=2)
        row = measure_prefill(engine, 301, 1, options, deadline=Deadline(60), say=lambda _text: None)
    assert row.next_turn_cached == round(192 / 264, 4)
    assert row.next_turn_s > 0


def test_a_bench_ends_with_its_deadline_and_says_so(tmp_path: Path) -> None:
    with engine_of(tmp_path, OPTIONS.num_blocks) as engine:
        with pytest.raises(ConvoyError, match="longer than 0 s"):
            measure_decode(engine, 301, 1, OPTIONS, deadline=Deadline(0), say=lambda _text: None)
        assert engine.stats().running == 0


def test_a_request_that_ends_by_itself_is_an_error_and_no_hang(tmp_path: Path) -> None:
    class Short(DecodeOptions):
        max_tokens = 3

    options = Short((2,), context=20, num_windows=3, window_tokens=4)
    with engine_of(tmp_path, 64) as engine, pytest.raises(ConvoyError, match="ended before it was measured"):
        measure_decode(engine, 301, 1, options, deadline=Deadline(60), say=lambda _text: None)


def decoded(members: int, concurrent: int, rate: float) -> DecodeRow:
    return DecodeRow(members, concurrent, 600, rate, 1000 * concurrent / rate)


def test_ratios_are_those_of_the_rows_that_are_there() -> None:
    rows = [decoded(1, 1, 20), decoded(1, 16, 60), decoded(2, 1, 18), decoded(2, 16, 90), decoded(2, 32, 108)]
    assert decode_ratios(rows) == {"batch_16_over_serial": 5.0, "two_members_over_one_decode": 1.8}
    assert decode_ratios(rows[:2]) == {}
    bare = DecodeRow(1, 1, 600, 27.0, 37.037, STAGE)
    assert decode_ratios([*rows, bare]) == {
        "batch_16_over_serial": 5.0,
        "two_members_over_one_decode": 1.8,
        "loop_over_solo": 1.35,
        "alone_over_solo": 1.5,
    }


def test_the_best_chunk_and_window_of_two_members_is_compared_with_the_best_chunk_of_one() -> None:
    found = ((1, 1, 1, 10.0), (1, 2, 1, 8.0), (2, 1, 2, 9.0), (2, 2, 2, 12.0), (2, 2, 3, 17.0))
    rows = [PrefillRow(m, 100, chunk, window, 1.0, rate, 0.1, 0.9) for m, chunk, window, rate in found]
    assert prefill_ratios(rows) == {"two_members_over_one_prefill": 1.7}
    assert prefill_ratios(rows[:2]) == {}


def test_a_hop_is_what_the_ring_takes_beyond_its_stages_compute() -> None:
    steps = [StepRow(STAGE, 0, 9.0, 10.0), StepRow(STAGES, 0, 9.5, 11.0), StepRow(RING, 2, 10.1, 13.0)]
    rows = [DecodeRow(1, 1, 600, 100.0, 10.0, STAGE), DecodeRow(2, 1, 600, 90.0, 11.66)]
    assert hop_ratios(rows, steps) == {"hop_us": 300.0, "alone_over_solo_and_hops": 1.1}


def test_a_report_is_a_table_for_other_programs_too() -> None:
    rows = (decoded(1, 1, 20), decoded(2, 1, 18))
    text = Report("batch", Watch().machine(), "demo", {}, rows, {}).csv()
    read = list(csv.DictReader(text.splitlines()))
    assert [row["members"] for row in read] == ["1", "2"]
    assert float(read[1]["tokens_per_s"]) == 18
