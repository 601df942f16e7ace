"""Requests that sample nothing: one final state each, among requests that generate."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import replace

import pytest

from convoy.engine.outputs import EmbeddingOutput, ErrorOutput, FinishOutput, Output, TokenOutput
from convoy.engine.run.executor import StepResult
from convoy.errors import RequestError, StepError
from convoy.model.sampling.output_rows import SampleJob
from convoy.wire.messages.control import Step
from engine.test_engine import LIMITS, expected, make_engine, request
from engine.test_recovery import FakeRecovery, recovered, start
from support.fake_executor import FakeExecutor

WAIT_S = 20.0


def token_of(outputs: queue.SimpleQueue[Output]) -> int:
    """Return the token that the state stands for. A fake state is a row of logits."""
    first, last = outputs.get(timeout=WAIT_S), outputs.get(timeout=WAIT_S)
    assert isinstance(first, EmbeddingOutput), first
    assert isinstance(last, FinishOutput)
    assert (last.reason, last.text) == ("stop", "")
    return int(first.state.argmax())


@pytest.mark.parametrize("depth", [1, 3])
def test_embeddings_run_among_answers_and_sample_nothing(depth: int) -> None:
    engine = make_engine(FakeExecutor(depth), replace(LIMITS, micro_batches=depth))
    engine.start()
    prompts = [[i + 1] * (3 * i + 1) for i in range(8)]
    heard: list[queue.SimpleQueue[Output]] = [queue.SimpleQueue() for _ in prompts]
    answer: queue.SimpleQueue[Output] = queue.SimpleQueue()
    engine.submit(request([9, 9], 20), answer.put)
    for prompt, outputs in zip(prompts, heard, strict=True):
        engine.submit(request(prompt, 0, embeds=True), outputs.put)
    assert [token_of(outputs) for outputs in heard] == [expected(prompt, 1)[0] for prompt in prompts]
    tokens = []
    while isinstance(output := answer.get(timeout=WAIT_S), TokenOutput):
        tokens.append(output.token_id)
    assert tokens == expected([9, 9], 20)
    stats = engine.stats()
    assert stats.generated_tokens == 20
    assert stats.free_blocks == stats.num_blocks
    engine.close()


def test_an_embedding_is_run_again_after_a_loss() -> None:
    engine = start(FakeExecutor(fail_at=3), FakeRecovery([recovered()]))
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    prompt = [5] * 60
    engine.submit(request(prompt, 0, embeds=True), outputs.put)
    assert token_of(outputs) == expected(prompt, 1)[0]
    assert engine.stats().recoveries == 1
    engine.close()


class BadStates(FakeExecutor):
    """Return a state that is not finite for every job that wants one."""

    def submit(self, step: Step, jobs: Sequence[SampleJob]) -> None:
        super().submit(step, jobs)
        result = self.results.pop()
        assert isinstance(result, StepResult)
        error = StepError("a final state is not finite")
        outcomes = tuple(one if one.state is None else replace(one, error=error) for one in result.outcomes)
        self.results.append(replace(result, outcomes=outcomes))


def test_a_state_that_is_not_finite_ends_its_own_request_alone() -> None:
    engine = make_engine(BadStates())
    engine.start()
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    answer: queue.SimpleQueue[Output] = queue.SimpleQueue()
    engine.submit(request([1, 2], 0, embeds=True), outputs.put)
    engine.submit(request([3], 5), answer.put)
    failed = outputs.get(timeout=WAIT_S)
    assert isinstance(failed, ErrorOutput)
    assert isinstance(failed.error, StepError)
    assert isinstance(answer.get(timeout=WAIT_S), TokenOutput)
    engine.close()


def test_a_prompt_may_fill_the_context_and_no_more() -> None:
    engine = make_engine(FakeExecutor())
    engine.start()
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    engine.submit(request([7] * 128, 0, embeds=True), outputs.put)
    assert token_of(outputs) == expected([7] * 128, 1)[0]
    with pytest.raises(RequestError, match="the context holds 128"):
        engine.submit(request([7] * 129, 0, embeds=True), outputs.put)
    engine.close()
