"""After a loss, over stages that compute other bits, each token that may have gone another way is told."""

from __future__ import annotations

import logging
import queue
from dataclasses import replace

import pytest

from convoy.engine.completion import generate
from convoy.engine.outputs import Output, TokenOutput
from convoy.engine.requests.near_tie import NEAR_TIE, is_near_tie
from convoy.engine.run.executor import NewStages
from convoy.engine.scheduler import SchedulerLimits
from convoy.model.sampling.params import SamplingParams
from convoy.model.sampling.sample import Sampled
from engine.test_engine import LIMITS, expected, request
from engine.test_recovery import FakeRecovery, start
from support.fake_executor import FakeExecutor

PROMPT = [1, 2]
RIVAL_AT = 16  # well behind the loss


def others(
    distance: float, *, same_bits: bool = False, limits: SchedulerLimits = LIMITS, near_tie: float = NEAR_TIE
) -> NewStages:
    executor = FakeExecutor()
    executor.rival = (RIVAL_AT, distance)
    return NewStages(executor, limits, 128, same_bits=same_bits, near_tie=near_tie)


@pytest.mark.parametrize(
    ("stages", "num_told"),
    [
        (others(NEAR_TIE / 2), 1),
        (others(NEAR_TIE * 2), 0),
        (others(NEAR_TIE * 2, near_tie=NEAR_TIE * 4), 1),
        (others(NEAR_TIE / 2, same_bits=True), 0),
    ],
)
def test_a_near_tie_behind_a_loss_is_counted_and_told_once(
    stages: NewStages, num_told: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine = start(FakeExecutor(fail_at=6), FakeRecovery([stages]))
    assert list(generate(engine, request(PROMPT, 20)).token_ids) == expected(PROMPT, 20)
    assert engine.stats().recoveries == 1
    assert engine.stats().near_ties == num_told
    told = [record.message for record in caplog.records if record.message.startswith("near_tie")]
    assert len(told) == num_told
    assert all(f"at position {RIVAL_AT} " in text for text in told)
    # a request that starts now has no text to replay
    again = request([3, 4, 5], 20)
    generate(engine, again)
    assert engine.stats().near_ties == num_told
    engine.close()


@pytest.mark.parametrize("num_top", [None, 0, 1, 5])
def test_a_client_sees_no_more_alternatives_than_it_asked_for(num_top: int | None) -> None:
    engine = start(FakeExecutor(fail_at=6), FakeRecovery([others(NEAR_TIE / 2)]))
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    asked = request(PROMPT, 20, params=SamplingParams(temperature=0.0, logprobs=num_top))
    engine.submit(asked, outputs.put)
    seen = []
    while isinstance(output := outputs.get(timeout=60), TokenOutput):
        seen.append(None if output.logprob is None else len(output.logprob.top))
    assert seen == [num_top] * 20
    assert engine.stats().near_ties == 1
    engine.close()


def test_where_chance_chose_nothing_is_told_of_two_best() -> None:
    engine = start(FakeExecutor(fail_at=6), FakeRecovery([others(NEAR_TIE / 2)]))
    generate(engine, request(PROMPT, 20, params=SamplingParams(temperature=1.0, seed=1)))
    assert engine.stats().near_ties == 0
    engine.close()


def test_a_near_tie_needs_two_tokens() -> None:
    assert is_near_tie(Sampled(3, -0.7, ((3, -0.7), (4, -0.7 - NEAR_TIE / 2))))
    assert not is_near_tie(Sampled(3, -0.7, ((3, -0.7), (4, -0.7 - 2 * NEAR_TIE))))
    assert not is_near_tie(Sampled(3, -0.7, ((3, -0.7),)))
    assert not is_near_tie(replace(Sampled(3), top=()))
