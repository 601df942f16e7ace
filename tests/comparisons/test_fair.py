"""The pauses of running streams while a long prompt is read, counted by hand."""

from __future__ import annotations

import pytest

from comparisons.fair import FairOptions, FairRow, StepTime, TimedExecutor, fair_ratios, fair_row
from convoy.engine.run.executor import Executor, StepResult
from convoy.errors import ConvoyError
from convoy.model.sampling.output_rows import GREEDY
from convoy.wire.messages.control import BlockGrant, Row, Step
from support.fake_executor import FakeExecutor

OPTIONS = FairOptions(num_running=2, context=16, prompt_tokens=100, chunk=50, before_tokens=2)


def mixed(at_s: float, seconds: float) -> StepTime:
    return StepTime(at_s, seconds, num_decodes=2, num_chunks=1)


def test_pauses_count_where_they_end_and_steps_where_they_begin() -> None:
    one = [0.0, 0.1, 0.2, 0.3, 0.7, 1.2, 1.3]
    other = [0.0, 0.1, 0.2, 0.3, 0.6, 1.1, 1.4]
    steps = [StepTime(0.2, 0.1, 2, 0), mixed(0.3, 0.4), mixed(0.7, 0.5), mixed(1.2, 9.0)]
    row = fair_row(2, OPTIONS, [one, other], steps, (0.3, 1.2))
    # before: 100 ms each; while it was read: 400 and 500, and 300 and 500
    assert (row.before_p50_ms, row.p50_ms, row.p99_ms) == (100.0, 400.0, 500.0)
    assert row.mixed_step_ms == 400.0
    assert row.p99_over_mixed_step == 1.25
    assert row.prefill_s == 0.9


def test_a_prompt_that_is_read_at_once_says_nothing_and_is_an_error() -> None:
    with pytest.raises(ConvoyError, match="before a stream gave a token"):
        fair_row(1, OPTIONS, [[0.0, 0.1]], [mixed(0.2, 0.1)], (0.2, 0.3))


def test_ratios_name_the_number_of_members() -> None:
    rows = [FairRow(members, 2, 100, 50, 1, 2, 3, 2, members + 0.5, 1) for members in (1, 2)]
    assert fair_ratios(rows) == {
        "one_member_p99_over_mixed_step": 1.5,
        "two_members_p99_over_mixed_step": 2.5,
    }


def test_a_timed_executor_tells_decodes_from_chunks() -> None:
    executor: Executor = FakeExecutor()
    timed = TimedExecutor(executor)
    rows = [Row(0, 0, 1, 1), Row(1, 0, 4, 0), Row(2, 0, 1, 1)]
    grants = [BlockGrant.append(number, 0, [2 * number, 2 * number + 1]) for number in range(3)]
    step = Step(0, [], grants, rows, bytes(24))
    timed.submit(step, [GREEDY, GREEDY])
    assert isinstance(timed.collect(), StepResult)
    assert [(one.num_decodes, one.num_chunks) for one in timed.steps] == [(2, 1)]
    assert timed.steps[0].seconds >= 0
