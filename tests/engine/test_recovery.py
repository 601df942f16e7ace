"""An engine that loses its stages and gets others: fakes, but a real loop on a real thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import pytest

from convoy.engine.active import MAX_FAILURES
from convoy.engine.completion import generate
from convoy.engine.engine import Engine, EngineOptions
from convoy.engine.kv.limits import GroupLimits
from convoy.engine.outputs import ErrorOutput, FinishOutput, Output, TokenOutput
from convoy.engine.run.executor import NewStages, Replan, StepResult
from convoy.errors import (
    CapacityError,
    ConvoyError,
    LinkClosed,
    ModelError,
    NotReady,
    RequestError,
    StageLost,
    StepLate,
)
from convoy.model.sampling.output_rows import SampleJob
from convoy.model.text.tokens import Tokenizer
from convoy.wire.messages.control import Step
from engine.test_engine import LIMITS, expected, request
from support.fake_executor import FakeExecutor
from support.fake_tokenizer import FakeTokenizer
from support.waiting import wait_until

WAIT_S = 20.0


@dataclass
class FakeRecovery:
    """Answer each loss with the next of ``answers``, once ``gate`` is open."""

    answers: list[NewStages | ConvoyError | None]
    gate: threading.Event = field(default_factory=threading.Event)
    losses: list[StageLost | Replan] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)

    def recover(self, error: StageLost) -> NewStages | None:
        return self._answer(error)

    def replan(self, request: Replan) -> NewStages | None:
        return self._answer(request)

    def _answer(self, cause: StageLost | Replan) -> NewStages | None:
        self.losses.append(cause)
        while not (self.gate.wait(0.01) and self.answers):
            if self.cancelled.wait(0.01):
                raise LinkClosed("the engine is being closed")
        answer = self.answers.pop(0)
        if isinstance(answer, ConvoyError):
            raise answer
        return answer

    def state(self) -> str:
        return "missing layers 4-11, beta is gone"

    def cancel(self) -> None:
        self.cancelled.set()


class LateExecutor(FakeExecutor):
    """Report once that a step is late, and bring it when asked again."""

    def __init__(self, late_at: int, depth: int = 1) -> None:
        super().__init__(depth)
        self._late_at = late_at
        self._told = False

    def collect(self) -> StepResult:
        if not self._told and self.results and len(self.steps) > self._late_at:
            self._told = True
            raise StepLate("a step did not come back within 1 s")
        return super().collect()


def recovered(num_blocks: int = 64, max_context: int = 128, fail_at: int | None = None) -> NewStages:
    limits = replace(LIMITS, groups=(GroupLimits(num_blocks),))
    return NewStages(FakeExecutor(fail_at=fail_at), limits, max_context)


def start(executor: FakeExecutor, recovery: FakeRecovery, *, open_gate: bool = True) -> Engine:
    if open_gate:
        recovery.gate.set()
    tokenizer = cast(Tokenizer, FakeTokenizer())
    limits = replace(LIMITS, micro_batches=executor.depth)
    options = EngineOptions(max_context=128, probe_s=3600.0)
    engine = Engine(executor, tokenizer, limits, options, recovery=recovery)
    engine.start()
    return engine


def collect(outputs: queue.SimpleQueue[Output]) -> list[int]:
    tokens = []
    while not isinstance(output := outputs.get(timeout=WAIT_S), FinishOutput):
        assert isinstance(output, TokenOutput), output
        tokens.append(output.token_id)
    return tokens


@pytest.mark.parametrize("depth", [1, 3])
def test_requests_go_on_over_other_stages_with_the_same_tokens(depth: int) -> None:
    recovery = FakeRecovery([recovered()])
    engine = start(FakeExecutor(depth, fail_at=9), recovery)
    prompts = [[i, i + 1, i + 2] for i in range(5)]
    streams: list[queue.SimpleQueue[Output]] = [queue.SimpleQueue() for _ in prompts]
    for prompt, stream in zip(prompts, streams, strict=True):
        engine.submit(request(prompt, 20), stream.put)
    assert [collect(stream) for stream in streams] == [expected(prompt, 20) for prompt in prompts]
    assert engine.stats().recoveries == 1
    assert engine.stats().free_blocks == engine.stats().num_blocks
    engine.close()


def test_two_losses_in_a_row_cost_no_token() -> None:
    recovery = FakeRecovery([recovered(fail_at=0), recovered()])
    engine = start(FakeExecutor(fail_at=6), recovery)
    assert list(generate(engine, request([1, 2, 3], 20)).token_ids) == expected([1, 2, 3], 20)
    assert engine.stats().recoveries == 2
    engine.close()


def test_step_numbers_go_on() -> None:
    other = FakeExecutor()
    engine = start(FakeExecutor(fail_at=6), FakeRecovery([NewStages(other, LIMITS, 128)]))
    generate(engine, request([1], 20))
    assert min(step.number for step in other.steps) > 6
    engine.close()


def test_while_it_recovers_it_is_not_ready_and_says_why_and_takes_requests() -> None:
    recovery = FakeRecovery([recovered()])
    engine = start(FakeExecutor(fail_at=6), recovery, open_gate=False)
    first: queue.SimpleQueue[Output] = queue.SimpleQueue()
    second: queue.SimpleQueue[Output] = queue.SimpleQueue()
    engine.submit(request([1], 20), first.put)
    wait_until(lambda: recovery.losses)
    with pytest.raises(NotReady, match="recovering: missing layers 4-11, beta is gone"):
        engine.check_ready()
    engine.submit(request([2], 5), second.put)
    recovery.gate.set()
    assert collect(first) == expected([1], 20)
    assert collect(second) == expected([2], 5)
    engine.check_ready()
    engine.close()


def test_a_request_can_be_aborted_while_it_recovers() -> None:
    recovery = FakeRecovery([recovered()])
    engine = start(FakeExecutor(fail_at=6), recovery, open_gate=False)
    first: queue.SimpleQueue[Output] = queue.SimpleQueue()
    second: queue.SimpleQueue[Output] = queue.SimpleQueue()
    handle = engine.submit(request([1], 20), first.put)
    engine.submit(request([2], 20), second.put)
    wait_until(lambda: recovery.losses)
    handle.abort()
    recovery.gate.set()
    assert collect(second) == expected([2], 20)
    wait_until(lambda: engine.stats().free_blocks == engine.stats().num_blocks)
    engine.close()


def test_closing_ends_a_recovery_that_waits() -> None:
    recovery = FakeRecovery([recovered()])
    engine = start(FakeExecutor(fail_at=6), recovery, open_gate=False)
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    engine.submit(request([1], 20), outputs.put)
    wait_until(lambda: recovery.losses)
    engine.close()
    assert not engine.is_running
    while isinstance(output := outputs.get(timeout=WAIT_S), TokenOutput):
        pass
    assert isinstance(output, ErrorOutput)


class TooLateRecovery(FakeRecovery):
    """Find other stages just when the engine is closed."""

    def recover(self, error: StageLost) -> NewStages | None:
        return self._answer(error)

    def replan(self, request: Replan) -> NewStages | None:
        return self._answer(request)

    def _answer(self, cause: StageLost | Replan) -> NewStages | None:
        self.losses.append(cause)
        assert self.cancelled.wait(WAIT_S)
        return recovered()


def test_stages_that_come_while_the_engine_is_closed_run_nothing(caplog: pytest.LogCaptureFixture) -> None:
    recovery = TooLateRecovery([])
    engine = start(FakeExecutor(fail_at=6), recovery)
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    engine.submit(request([1], 20), outputs.put)
    wait_until(lambda: recovery.losses)
    engine.close()
    assert not engine.is_running
    assert not caplog.records, "it ended by itself"


class FullRing(FakeExecutor):
    """Hold a step until it is closed; then report that the ring is broken, whenever asked."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self.num_asked = 0
        self.held = threading.Event()
        self.broken = threading.Event()

    def collect(self) -> StepResult:
        if len(self.steps) < 4:
            return super().collect()
        self.held.set()
        assert self.broken.wait(WAIT_S)
        self.num_asked += 1
        raise StepLate("a step did not come back within 1 s")

    def close(self) -> None:
        self.broken.set()


@pytest.mark.parametrize("depth", [1, 3])
def test_a_ring_that_breaks_while_the_engine_is_closed_is_asked_once(depth: int) -> None:
    executor = FullRing(depth)
    recovery = FakeRecovery([])
    engine = start(executor, recovery)
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    engine.submit(request([1], 20), outputs.put)
    assert executor.held.wait(WAIT_S)
    engine.close()
    assert not engine.is_running
    assert executor.num_asked == 1
    assert not recovery.losses


def test_where_no_stages_are_to_be_had_every_request_ends_with_the_reason_until_there_are() -> None:
    recovery = FakeRecovery([StageLost("missing layers 4-11, beta is gone")])
    engine = start(FakeExecutor(fail_at=6), recovery)
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    engine.submit(request([1], 20), outputs.put)
    while isinstance(output := outputs.get(timeout=WAIT_S), TokenOutput):
        pass
    assert isinstance(output, ErrorOutput)
    assert "missing layers 4-11" in output.error.message
    with pytest.raises(StageLost, match="missing layers 4-11"):
        engine.submit(request([1]), outputs.put)
    with pytest.raises(StageLost, match="missing layers 4-11"):
        engine.check_ready()
    recovery.answers.append(recovered())
    wait_until(lambda: engine.stats().recoveries)
    assert list(generate(engine, request([1], 20)).token_ids) == expected([1], 20)
    engine.close()


def test_who_finds_no_stages_is_asked_again_with_its_own_word_and_the_log_says_it_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    vain = [StageLost("missing layers 4-11, beta is gone") for _ in range(5)]
    recovery = FakeRecovery([*vain])
    engine = start(FakeExecutor(fail_at=6), recovery)
    with pytest.raises(StageLost, match="missing layers 4-11"):
        generate(engine, request([1], 20))
    recovery.answers.append(recovered())
    wait_until(lambda: engine.stats().recoveries)
    assert recovery.losses[1:] == vain
    assert [record.message for record in caplog.records].count(
        "nothing can run now: missing layers 4-11, beta is gone"
    ) == 1
    engine.close()


def test_what_is_wrong_for_good_ends_the_engine() -> None:
    engine = start(FakeExecutor(fail_at=6), FakeRecovery([ModelError("the files of the model are gone")]))
    with pytest.raises(ModelError, match="the files of the model are gone"):
        generate(engine, request([1], 20))
    wait_until(lambda: not engine.is_running)
    engine.close()


SMALLER = pytest.mark.parametrize("stages", [recovered(num_blocks=4), recovered(max_context=16)])


@SMALLER
def test_a_request_that_has_more_tokens_than_other_stages_hold_ends_alone(stages: NewStages) -> None:
    recovery = FakeRecovery([replace(stages, executor=FakeExecutor())])
    engine = start(FakeExecutor(fail_at=6), recovery, open_gate=False)
    large: queue.SimpleQueue[Output] = queue.SimpleQueue()
    small: queue.SimpleQueue[Output] = queue.SimpleQueue()
    engine.submit(request([1] * 17, 20), large.put)
    engine.submit(request([2], 10), small.put)
    recovery.gate.set()
    while isinstance(output := large.get(timeout=WAIT_S), TokenOutput):
        pass
    assert isinstance(output, ErrorOutput)
    assert isinstance(output.error, CapacityError)
    assert "tokens already, and after a loss there is room for 16" in output.error.message
    assert collect(small) == expected([2], 10)
    engine.close()


@SMALLER
@pytest.mark.parametrize("prompt", [[1], [1] * 10])
def test_a_request_that_still_fits_goes_on_to_the_new_wall(stages: NewStages, prompt: list[int]) -> None:
    engine = start(FakeExecutor(fail_at=6), FakeRecovery([replace(stages, executor=FakeExecutor())]))
    assert engine.room == 128
    answer = generate(engine, request(prompt, 60))
    assert list(answer.token_ids) == expected(prompt, 16 - len(prompt))
    assert answer.finish_reason == "length"
    assert engine.room == 16
    engine.close()


@SMALLER
def test_after_a_loss_an_answer_of_any_length_fits_what_there_is(stages: NewStages) -> None:
    engine = start(FakeExecutor(fail_at=3), FakeRecovery([replace(stages, executor=FakeExecutor())]))
    generate(engine, request([1], 8))
    asked = request([2, 3], 126)  # as much as there was room for before
    with pytest.raises(RequestError, match="max_tokens is 126" if stages.max_context == 16 else "32 K/V"):
        engine.submit(asked, print)
    answer = generate(engine, replace(asked, open_ended=True))
    assert (list(answer.token_ids), answer.finish_reason) == (expected([2, 3], 14), "length")
    engine.close()


@pytest.mark.parametrize("depth", [1, 3])
def test_a_late_step_that_still_comes_is_waited_for_and_nothing_runs_twice(depth: int) -> None:
    executor = LateExecutor(late_at=5, depth=depth)
    recovery = FakeRecovery([None])
    engine = start(executor, recovery)
    assert list(generate(engine, request([1, 2], 20)).token_ids) == expected([1, 2], 20)
    assert [type(loss) for loss in recovery.losses] == [StepLate]
    assert engine.stats().recoveries == 0
    numbers = [step.number for step in executor.steps]
    assert numbers == sorted(set(numbers))
    engine.close()


def test_better_stages_are_taken_once_nothing_runs_and_are_no_recovery() -> None:
    recovery = FakeRecovery([recovered()])
    engine = start(FakeExecutor(), recovery)
    engine.renew("beta is here again")
    wait_until(lambda: recovery.losses)
    assert recovery.losses == [Replan("beta is here again")]
    assert list(generate(engine, request([1], 20)).token_ids) == expected([1], 20)
    assert engine.stats().recoveries == 0
    engine.close()


def test_a_loss_while_nothing_runs_is_looked_for_when_somebody_says_so() -> None:
    recovery = FakeRecovery([recovered()])
    executor = FakeExecutor()
    engine = start(executor, recovery)
    executor.fail_at = 0
    say: Callable[[], None] = engine.wake
    say()
    wait_until(lambda: engine.stats().recoveries)
    wait_until(lambda: engine.stats().ring_s is not None)
    engine.check_ready()
    engine.close()


def test_what_runs_whenever_stages_fail_ends_and_the_others_go_on() -> None:
    failures = [replace(recovered(fail_at=0), without_loss=True) for _ in range(MAX_FAILURES)]
    engine = start(FakeExecutor(fail_at=3), FakeRecovery([*failures, recovered()]))
    with pytest.raises(StageLost, match=f"failed at the request {MAX_FAILURES} times in a row"):
        generate(engine, request([1, 2, 3], 20))
    assert list(generate(engine, request([4], 20)).token_ids) == expected([4], 20)
    engine.close()


class PoisonedExecutor(FakeExecutor):
    """Fail at every step that has the token 1, which this model never says."""

    def submit(self, step: Step, jobs: Sequence[SampleJob]) -> None:
        super().submit(step, jobs)
        if 1 in np.frombuffer(step.tokens, dtype="<u4"):
            self.results[-1] = StageLost("the fake stage cannot run it")


def test_what_runs_beside_a_request_that_no_stage_can_run_goes_on() -> None:
    failures = [
        NewStages(PoisonedExecutor(), LIMITS, 128, without_loss=True) for _ in range(4 * MAX_FAILURES)
    ]
    engine = start(PoisonedExecutor(), FakeRecovery([*failures]))
    prompts = [[3, 4, 5], [4, 5], [6, 1, 6], [7], [8, 9]]
    streams: list[queue.SimpleQueue[Output]] = [queue.SimpleQueue() for _ in prompts]

    def submit_all(*_: object) -> None:
        for prompt, stream in zip(prompts, streams, strict=True):
            engine.submit(request(prompt, 20), stream.put)

    engine.between_steps(submit_all)  # all of them are there at the next step
    over = streams[2].get(timeout=WAIT_S)
    assert isinstance(over, ErrorOutput)
    assert "failed at the request" in over.error.message
    del prompts[2], streams[2]
    assert [collect(stream) for stream in streams] == [expected(prompt, 20) for prompt in prompts]
    engine.close()


def test_what_fails_by_itself_at_one_member_after_another_ends_before_the_next() -> None:
    where = ["beta", "beta", "beta", "gamma", "gamma", "delta"]
    failures = [NewStages(PoisonedExecutor(), LIMITS, 128, without_loss=True, failed_at=one) for one in where]
    recovery = FakeRecovery([*failures])
    engine = start(PoisonedExecutor(), recovery)
    with pytest.raises(StageLost, match="failed at the request 5 times in a row, at beta and at gamma"):
        generate(engine, request([6, 1, 6], 20))
    assert [answer for answer in recovery.answers if isinstance(answer, NewStages)] == failures[5:]
    engine.close()


def test_what_fails_once_beside_a_member_that_fails_always_goes_on() -> None:
    failures = [replace(recovered(fail_at=0), without_loss=True, failed_at="beta") for _ in range(3)]
    last = replace(recovered(), without_loss=True, failed_at="gamma")
    engine = start(FakeExecutor(fail_at=3), FakeRecovery([*failures, last]))
    assert list(generate(engine, request([2, 3], 20)).token_ids) == expected([2, 3], 20)
    engine.close()


def test_losses_of_members_are_nobodys_fault() -> None:
    losses = [recovered(fail_at=0) for _ in range(2 * MAX_FAILURES)]
    engine = start(FakeExecutor(fail_at=3), FakeRecovery([*losses, recovered()]))
    assert list(generate(engine, request([1, 2, 3], 20)).token_ids) == expected([1, 2, 3], 20)
    engine.close()
