from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any, cast

import pytest

from convoy.config.table import HOST_CHUNK
from convoy.engine.engine import Engine, EngineOptions
from convoy.engine.kv.limits import GroupLimits
from convoy.engine.outputs import FinishOutput, Output
from convoy.engine.requests.request import GenerationRequest
from convoy.engine.run.executor import StepResult
from convoy.engine.scheduler import SchedulerLimits
from convoy.engine.stats import ChoiceMeter, EngineProgress, Histogram, RequestCounts
from convoy.model.sampling.params import SamplingParams
from convoy.model.text.tokens import Tokenizer
from support.fake_executor import FakeExecutor
from support.fake_tokenizer import FakeTokenizer
from support.waiting import wait_until

LIMITS = SchedulerLimits(groups=(GroupLimits(64),), block_size=4, max_batch=8)


def engine_of(executor: FakeExecutor) -> Engine:
    tokenizer = cast(Tokenizer, FakeTokenizer())
    return Engine(executor, tokenizer, LIMITS, EngineOptions(max_context=128, probe_s=3600.0))


def request(prompt: list[int], max_tokens: int, **changes: Any) -> GenerationRequest:
    params = SamplingParams(temperature=0.0)
    return replace(GenerationRequest(tuple(prompt), params, max_tokens, ignore_eos=True), **changes)


def answer(engine: Engine, asked: GenerationRequest) -> None:
    """Run until every choice is finished."""
    outputs: list[Output] = []
    engine.submit(asked, outputs.append)
    wait_until(lambda: sum(isinstance(one, FinishOutput) for one in list(outputs)) == asked.num_choices)


def test_the_rate_of_chunks_is_that_of_the_last_without_their_wait_behind_another_step() -> None:
    now_s = 10.0
    progress = EngineProgress(lambda: now_s)
    for took_s in (0.125, 0.125, 9.0, 0.125, 0.125):
        assert progress.tokens_in(0.5) is None
        submitted_s, now_s = now_s - 1.0, now_s + took_s
        progress.passed(submitted_s, num_sequences=3, num_tokens=403)
    assert progress.tokens_in(0.5) == 1612
    progress.other_stages()
    assert progress.tokens_in(0.5) is None


def test_the_least_chunks_beside_decodes_are_measured_too() -> None:
    now_s, num_decodes = 10.0, 64
    progress = EngineProgress(lambda: now_s)
    for took_s in (*[9.0] * 5, *[0.0625] * 5):
        submitted_s, now_s = now_s, now_s + took_s
        progress.passed(submitted_s, num_sequences=num_decodes + 1, num_tokens=num_decodes + HOST_CHUNK)
    assert progress.tokens_in(0.5) == 8 * (num_decodes + HOST_CHUNK)


def test_a_histogram_counts_a_value_under_every_bound_that_it_is_not_over() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    counts = histogram.snapshot()
    assert counts.cumulative == (2, 3, 4)
    assert (counts.count, counts.sum) == (4, 12.0)


def test_each_time_is_measured_from_where_its_name_says() -> None:
    now = [100.0]
    counts = RequestCounts(lambda: now[0])
    meter = ChoiceMeter(counts, 7)
    for at_s, happens in (
        (102.0, meter.admitted),
        (103.0, meter.admitted),  # another chunk of the prompt
        (105.0, meter.advanced),
        (105.5, meter.advanced),
        (105.75, meter.advanced),
        (106.0, lambda: meter.finished("stop")),
    ):
        now[0] = at_s
        happens()
    sums = counts.snapshot()
    assert sums.prompt_tokens == 7
    assert sums.finished == {"stop": 1, "length": 0, "abort": 0, "error": 0}
    assert (sums.queued.sum, sums.first_token.sum, sums.whole.sum) == (2.0, 5.0, 6.0)
    assert (sums.between_tokens.count, sums.between_tokens.sum) == (2, 0.75)


def test_what_was_cut_short_has_no_latency_of_a_whole_answer() -> None:
    counts = RequestCounts()
    for why in ("abort", "error"):
        ChoiceMeter(counts, 3).finished(why)
    sums = counts.snapshot()
    assert sums.finished == {"stop": 0, "length": 0, "abort": 1, "error": 1}
    assert (sums.whole.count, sums.queued.count, sums.prompt_tokens) == (0, 0, 0)


def test_an_engine_counts_what_it_was_asked_and_not_its_own_first_token() -> None:
    engine = engine_of(FakeExecutor())
    engine.start()
    try:
        stats = engine.stats()
        assert (stats.requests.prompt_tokens, stats.generated_tokens, stats.step_s.count) == (0, 0, 0)
        assert stats.queried_tokens == stats.requests.first_token.count == 0
        prompt = list(range(1, 10))
        for _ in range(2):
            answer(engine, request(prompt, 6, num_choices=2))
        stats = engine.stats()
    finally:
        engine.close()
    assert stats.requests.prompt_tokens == 2 * 9  # of a prompt once, however many choices it has
    assert stats.requests.finished["length"] == 4
    assert stats.requests.first_token.count == stats.requests.whole.count == 4
    assert stats.requests.between_tokens.count == 4 * 5
    assert stats.queried_tokens == 4 * 9
    assert stats.hit_tokens == stats.cached_tokens >= 2 * 8  # the second request's, two whole blocks each
    assert stats.step_s.count > 0
    assert stats.kv_usage == 0.0  # kept blocks count as free


def test_an_aborted_request_is_counted_as_one() -> None:
    executor = Held()
    engine = engine_of(executor)
    engine.start()
    try:
        outputs: list[Output] = []
        handle = engine.submit(request([1, 2, 3], 100), outputs.append)
        wait_until(lambda: bool(outputs))
        assert engine.stats().kv_usage > 0
        handle.abort()
        executor.may_go_on.set()
        wait_until(lambda: engine.stats().requests.finished["abort"] == 1)
        assert engine.stats().requests.finished["length"] == 0
    finally:
        executor.may_go_on.set()
        engine.close()


class Held(FakeExecutor):
    """Hold the third step's result back: a request of many tokens is not over before that."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()

    def collect(self) -> StepResult:
        result = super().collect()
        if result.number >= 3:
            assert self.may_go_on.wait(30)
        return result


def test_what_is_run_again_after_a_preemption_is_counted_once() -> None:
    tokenizer = cast(Tokenizer, FakeTokenizer())
    limits = replace(LIMITS, groups=(GroupLimits(8),))
    engine = Engine(FakeExecutor(), tokenizer, limits, EngineOptions(max_context=32, probe_s=3600.0))
    engine.start()
    try:
        outputs: list[Output] = []
        for start in (1, 30):
            engine.submit(request(list(range(start, start + 10)), 14), outputs.append)
        wait_until(lambda: sum(isinstance(one, FinishOutput) for one in list(outputs)) == 2)
        stats = engine.stats()
    finally:
        engine.close()
    assert stats.preempted > 0
    assert stats.requests.prompt_tokens == stats.queried_tokens == 2 * 10
    assert stats.requests.first_token.count == stats.requests.queued.count == 2
    assert stats.requests.between_tokens.count == 2 * 13


@pytest.mark.parametrize("enabled", [True, False])
def test_a_cache_that_is_off_is_asked_for_nothing(enabled: bool) -> None:
    tokenizer = cast(Tokenizer, FakeTokenizer())
    limits = replace(LIMITS, prefix_cache=enabled)
    engine = Engine(FakeExecutor(), tokenizer, limits, EngineOptions(max_context=128, probe_s=3600.0))
    engine.start()
    try:
        answer(engine, request([1, 2, 3], 2))
        assert engine.stats().queried_tokens == (3 if enabled else 0)
    finally:
        engine.close()
