"""The engine over a fake executor: a real loop and a real thread, no model."""

import itertools
import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from convoy.engine.completion import generate
from convoy.engine.engine import Engine, EngineOptions
from convoy.engine.outputs import (
    ErrorOutput,
    FinishOutput,
    Output,
    PrefillOutput,
    PromptOutput,
    TokenOutput,
)
from convoy.engine.requests.request import GenerationRequest
from convoy.engine.scheduler import GroupLimits, SchedulerLimits
from convoy.errors import Draining, NotReady, QueueFull, RequestError, StageLost
from convoy.model.sampling.params import SamplingParams
from convoy.model.text.tokens import Tokenizer
from convoy.wire.messages.control import FED
from support.fake_executor import VOCAB, FakeExecutor, next_token
from support.fake_tokenizer import EOS, FakeTokenizer

GREEDY = SamplingParams(temperature=0.0)
LIMITS = SchedulerLimits(
    groups=(GroupLimits(64),), block_size=4, max_batch=8, max_step_tokens=24, prefill_chunk=8, max_waiting=64
)


def make_engine(
    executor: FakeExecutor,
    limits: SchedulerLimits = LIMITS,
    probe_s: float = 3600.0,
    first_rows: tuple[int, ...] = (1,),
) -> Engine:
    tokenizer = cast(Tokenizer, FakeTokenizer())
    return Engine(executor, tokenizer, limits, EngineOptions(128, first_rows, probe_s))


def request(prompt: list[int], max_tokens: int = 12, **changes: Any) -> GenerationRequest:
    return replace(
        GenerationRequest(tuple(prompt), GREEDY, max_tokens=max_tokens, ignore_eos=True), **changes
    )


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def fed_executor(depth: int = 2) -> FakeExecutor:
    """Return an executor that takes its own samples, and has the wrong one every fifth time."""
    executor, numbers = FakeExecutor(depth=depth, feeds=True), itertools.count(1)
    executor.misfeeds = lambda: next(numbers) % 5 == 0
    return executor


@pytest.fixture(params=["one in flight", "three in flight", "fed", "three in flight, fed"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    depth = 3 if request.param.startswith("three in flight") else 1
    executor = fed_executor(2 * depth) if request.param.endswith("fed") else FakeExecutor(depth=depth)
    engine = make_engine(executor, replace(LIMITS, micro_batches=depth))
    engine.start()
    yield engine
    engine.close()


def test_a_request_gets_the_tokens_it_would_get_alone(engine: Engine) -> None:
    prompt = [5, 6, 7]
    assert list(generate(engine, request(prompt)).token_ids) == expected(prompt, 12)


def test_sixteen_requests_of_unequal_lengths_get_what_each_gets_alone(engine: Engine) -> None:
    prompts = [[(7 * i + j) % VOCAB for j in range(1 + 5 * i)] for i in range(16)]
    answers: dict[int, list[int]] = {}

    def run(index: int) -> None:
        answers[index] = list(generate(engine, request(prompts[index], 4 + index)).token_ids)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {i: expected(prompts[i], 4 + i) for i in range(16)}
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, stats.num_blocks)


def test_too_few_blocks_preempt_but_change_no_token() -> None:
    engine = make_engine(FakeExecutor(), replace(LIMITS, groups=(GroupLimits(12),)))
    engine.start()
    prompts = [[i, i + 1, i + 2] for i in range(4)]
    answers: dict[int, list[int]] = {}
    threads = [
        threading.Thread(
            target=lambda i=i: answers.update({i: list(generate(engine, request(prompts[i], 20)).token_ids)})
        )
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {i: expected(prompts[i], 20) for i in range(4)}
    engine.close()


def test_the_chunks_of_a_prompt_are_told_before_its_first_token_if_asked_for(engine: Engine) -> None:
    for tells, chunks in ((True, [8, 16]), (False, [])):
        outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        # No request before it had this prompt.
        prompt = [tells + 3 * i % VOCAB for i in range(20)]
        engine.submit(replace(request(prompt, 1), tells_prefill=tells), outputs.put)
        told = [PrefillOutput(num_done, 0, 20) for num_done in chunks]
        assert [outputs.get(timeout=60) for _ in told] == told
        assert isinstance(outputs.get(timeout=60), TokenOutput)


def test_a_preempted_prompt_tells_each_chunk_once_and_none_behind_a_token() -> None:
    engine = make_engine(FakeExecutor(), replace(LIMITS, groups=(GroupLimits(12),)))
    engine.start()
    queues = []
    for number in range(4):
        outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        prompt = [(number + 5 * place) % VOCAB for place in range(20)]
        engine.submit(replace(request(prompt, 16), tells_prefill=True), outputs.put)
        queues.append(outputs)
    for outputs in queues:
        told: list[Output] = []
        while not told or not isinstance(told[-1], FinishOutput):
            told.append(outputs.get(timeout=60))
        chunks = [one.num_done for one in told if isinstance(one, PrefillOutput)]
        assert chunks == sorted(set(chunks))
        assert all(isinstance(one, PrefillOutput) for one in told[: len(chunks)])
    assert engine.stats().preempted > 0
    engine.close()


def test_choices_of_one_request_are_numbered_and_each_ends_once(engine: Engine) -> None:
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    engine.submit(request([1, 2], 5, num_choices=3), outputs.put)
    finished: list[int] = []
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while len(finished) < 3:
        output = outputs.get(timeout=60)
        if isinstance(output, FinishOutput):
            finished.append(output.choice)
            assert output.reason == "length"
        elif isinstance(output, TokenOutput):
            tokens[output.choice].append(output.token_id)
    assert sorted(finished) == [0, 1, 2]
    assert all(ids == expected([1, 2], 5) for ids in tokens.values())


def test_an_end_of_text_token_ends_the_choice_and_is_never_shown() -> None:
    prompt = next([i] for i in range(VOCAB) if EOS in expected([i], 40))
    shown = expected(prompt, 40)
    shown = shown[: shown.index(EOS)]
    engine = make_engine(FakeExecutor())
    engine.start()
    answer = generate(engine, request(prompt, 40, ignore_eos=False))
    assert list(answer.token_ids) == shown
    assert answer.finish_reason == "stop"
    engine.close()


def test_what_a_device_runs_behind_the_end_of_a_text_is_neither_shown_nor_counted_nor_kept() -> None:
    prompt = next([i] for i in range(VOCAB) if EOS in expected([i], 40)[6:])
    shown = expected(prompt, 40)
    shown = shown[: shown.index(EOS)]
    executor = fed_executor()
    engine = make_engine(executor)
    engine.start()
    answer = generate(engine, request(prompt, 40, ignore_eos=False))
    assert (list(answer.token_ids), answer.finish_reason) == (shown, "stop")
    assert engine.stats().generated_tokens == len(shown)
    last = max(row.start for step in executor.steps for row in step.rows)
    assert last > len(shown), "the device ran on"
    behind = [*prompt, *shown, EOS, next_token([*prompt, *shown, EOS])]
    generate(engine, request([*behind, 1, 2, 3, 4], 1))
    assert engine.stats().cached_tokens <= len(prompt) + len(shown)
    engine.close()


def test_texts_that_a_device_feeds_itself_are_those_of_each_alone_also_without_room() -> None:
    executor = fed_executor()
    engine = make_engine(executor, replace(LIMITS, groups=(GroupLimits(16),)))
    engine.start()
    answers: dict[int, list[int]] = {}

    def run(index: int) -> None:
        answers[index] = list(generate(engine, request([index, 9], 12 + 3 * index)).token_ids)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {i: expected([i, 9], 12 + 3 * i) for i in range(6)}
    assert any(FED.to_bytes(4, "little") in step.tokens for step in executor.steps)
    engine.close()


def test_the_warm_up_has_a_step_for_each_number_of_rows_and_is_not_counted() -> None:
    executor = FakeExecutor()
    engine = make_engine(executor, first_rows=(1, 2, 8))
    engine.start()
    assert [len(step.rows) for step in executor.steps if step.rows] == [1, 2, 8]
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generated_tokens, stats.running) == (0, 0, 0)
    engine.close()


@pytest.mark.parametrize(
    ("max_batch", "micro_batches", "expected"),
    # Nine rows are padded to 16, and so are 15.
    [
        (256, 1, (1, 4, 16, 64)),
        (128, 2, (1, 4, 16, 64)),
        (30, 2, (1, 4, 15)),
        (9, 1, (1, 4, 9)),
        (1, 1, (1,)),
    ],
)
def test_the_warm_up_has_the_sizes_of_the_decodes_that_may_come(
    max_batch: int, micro_batches: int, expected: tuple[int, ...]
) -> None:
    limits = replace(LIMITS, max_batch=max_batch, micro_batches=micro_batches, max_step_tokens=512)
    limits = replace(limits, max_waiting=256)
    assert limits.decode_rows((1, 4, 16, 64)) == expected


def test_aborting_frees_the_blocks_and_tells_every_stage_within_a_step() -> None:
    executor = FakeExecutor()
    engine = make_engine(executor)
    engine.start()
    first_token = threading.Event()
    outputs: list[Output] = []

    def on_output(output: Output) -> None:
        outputs.append(output)
        if isinstance(output, TokenOutput) and not first_token.is_set():
            first_token.set()
            handle_ready.wait()
            handles[0].abort()

    handle_ready = threading.Event()
    handles = [engine.submit(request([1, 2, 3], 100), on_output)]
    handle_ready.set()
    assert first_token.wait(10)
    generate(engine, request([9], 1))
    assert isinstance(outputs[-1], FinishOutput)
    assert outputs[-1].reason == "abort"
    table = next(r.sequence for s in executor.steps for r in s.rows if r.num_tokens == 3)
    steps_with_it = [s.number for s in executor.steps if any(r.sequence == table for r in s.rows)]
    released = next(s.number for s in executor.steps if table in s.released)
    assert released <= steps_with_it[-1] + 2
    engine.close()


def test_prompt_logprobs_come_before_the_first_token_and_cover_the_prompt(engine: Engine) -> None:
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    prompt = [3, *expected([3], 20)]
    engine.submit(request(prompt, 1, prompt_logprobs=2), outputs.put)
    first = outputs.get(timeout=60)
    assert isinstance(first, PromptOutput)
    assert len(first.logprobs) == len(prompt)
    assert first.logprobs[0] is None
    assert [lp.token_id for lp in first.logprobs[1:] if lp] == prompt[1:]
    assert all(lp.logprob > -0.1 for lp in first.logprobs[1:] if lp), "the fake is sure of its next token"
    assert isinstance(outputs.get(timeout=60), TokenOutput)


def test_a_prompt_of_one_token_has_its_logprobs_told_too(engine: Engine) -> None:
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    engine.submit(request([3], 1, prompt_logprobs=0), outputs.put)
    assert outputs.get(timeout=60) == PromptOutput((None,))


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (GenerationRequest((), GREEDY, 1), "the prompt is empty"),
        (GenerationRequest((VOCAB,), GREEDY, 1), "outside the vocabulary of 64"),
        (
            GenerationRequest((1,), SamplingParams(logit_bias={VOCAB: 1.0}), 1),
            "logit_bias names a token outside the vocabulary",
        ),
        (
            GenerationRequest((1,) * 120, GREEDY, 9),
            "the prompt has 120 tokens and max_tokens is 9, but the context holds 128",
        ),
    ],
)
def test_a_request_that_cannot_fit_is_refused(engine: Engine, asked: GenerationRequest, text: str) -> None:
    with pytest.raises(RequestError, match=text):
        engine.submit(asked, lambda output: None)


def test_a_request_larger_than_the_whole_pool_is_refused() -> None:
    engine = make_engine(FakeExecutor(), replace(LIMITS, groups=(GroupLimits(4),)))
    with pytest.raises(RequestError, match="needs 5 K/V blocks of 4 tokens, but the whole pool has 4"):
        engine.submit(request([1] * 10, 10), lambda output: None)


def test_a_lost_stage_ends_every_request_with_the_reason_and_refuses_new_ones() -> None:
    engine = make_engine(FakeExecutor(fail_at=3))
    engine.start()
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    engine.submit(request([1, 2], 50), outputs.put)
    while not isinstance(output := outputs.get(timeout=60), ErrorOutput):
        assert isinstance(output, TokenOutput)
    assert isinstance(output.error, StageLost)
    with pytest.raises(StageLost):
        engine.submit(request([1]), lambda output: None)
    with pytest.raises(StageLost):
        engine.check_ready()
    engine.close()


def test_a_stage_lost_at_the_first_token_fails_the_start() -> None:
    engine = make_engine(FakeExecutor(fail_at=0))
    with pytest.raises(StageLost):
        engine.start()
    engine.close()


def test_the_waiting_queue_is_bounded() -> None:
    engine = make_engine(FakeExecutor(), replace(LIMITS, max_waiting=2))
    for _ in range(2):
        engine.submit(request([1]), lambda output: None)
    with pytest.raises(QueueFull):
        engine.submit(request([1]), lambda output: None)


def test_closing_lets_running_requests_finish_and_refuses_new_ones() -> None:
    engine = make_engine(FakeExecutor())
    engine.start()
    outputs: list[Output] = []
    engine.submit(request([4, 5], 30), outputs.append)
    engine.close(drain_s=10)
    assert isinstance(outputs[-1], FinishOutput)
    with pytest.raises((Draining, StageLost)):
        engine.submit(request([1]), lambda output: None)


def test_it_is_not_ready_before_a_token_has_passed() -> None:
    engine = make_engine(FakeExecutor())
    with pytest.raises(NotReady, match="no token has passed every stage yet"):
        engine.check_ready()
    engine.start()
    engine.check_ready()
    engine.close()


def test_an_idle_engine_probes_the_ring() -> None:
    executor = FakeExecutor()
    engine = make_engine(executor, probe_s=0.01)
    engine.start()
    waiter = threading.Event()
    for _ in range(500):
        if engine.stats().ring_s is not None:
            break
        waiter.wait(0.01)
    assert engine.stats().ring_s is not None
    assert any(not step.rows for step in executor.steps)
    engine.close()
