"""Whatever is guessed, the outputs are those of an engine that guesses nothing."""

from __future__ import annotations

import queue
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from random import Random
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.engine.engine import Engine, EngineOptions
from convoy.engine.outputs import ErrorOutput, FinishOutput, Output, TokenOutput
from convoy.engine.requests.request import GenerationRequest
from convoy.engine.requests.restrictions import check_restrictions
from convoy.engine.run.executor import NewStages
from convoy.engine.scheduler import Drafter, GroupLimits, Scheduler, SchedulerLimits
from convoy.engine.sequence import Sequence
from convoy.engine.speculation import LookupDrafter
from convoy.errors import RequestError
from convoy.model.kv.pools import BlockTables, GroupBlocks
from convoy.model.sampling.output_rows import SampleJob
from convoy.model.sampling.params import SamplingParams
from convoy.model.text.tokens import Tokenizer
from convoy.wire.messages.control import Step
from engine.test_recovery import FakeRecovery
from support.examples import examples
from support.fake_executor import VOCAB, FakeExecutor
from support.fake_tokenizer import FakeTokenizer

LIMITS = SchedulerLimits(
    groups=(GroupLimits(64),), block_size=4, max_batch=8, max_step_tokens=24, prefill_chunk=8, max_waiting=64
)
CONTEXT = 160


class CheckingExecutor(FakeExecutor):
    """Take a step only if a stage would: the tags of rewound rows included."""

    def __init__(self, num_blocks: int, depth: int = 1) -> None:
        super().__init__(depth)
        self._stage = BlockTables([GroupBlocks(num_blocks)], block_size=4, max_context=CONTEXT)

    def submit(self, step: Step, jobs: SequenceOf[SampleJob]) -> None:
        self._stage.commit(self._stage.stage(step))
        super().submit(step, jobs)


class Fortune:
    """Guess with luck: right for a while, then garbage. ``answers`` are whole sequences to come."""

    def __init__(self, random: Random, answers: SequenceOf[SequenceOf[int]]) -> None:
        self._random = random
        self._answers = answers
        self.drafted: dict[Sequence, int] = {}
        self.forgotten: set[Sequence] = set()

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        assert sequence not in self.forgotten
        assert max_tokens > 0
        known = len(sequence.tokens)
        right = [a[known:] for a in self._answers if list(a[:known]) == sequence.tokens]
        drafts = list(self._random.choice(right))[: self._random.randrange(9)] if right else []
        # more than was asked for is cut, not run
        drafts += [self._random.randrange(VOCAB) for _ in range(self._random.randrange(max_tokens + 3))]
        self.drafted[sequence] = min(max_tokens, len(drafts))
        return drafts

    def learn(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        assert num_drafts == self.drafted[sequence]
        assert 0 <= num_accepted <= num_drafts

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.add(sequence)


def engine_of(
    executor: FakeExecutor,
    limits: SchedulerLimits,
    drafter: Drafter | None,
    recovery: FakeRecovery | None = None,
) -> Engine:
    tokenizer = cast(Tokenizer, FakeTokenizer())
    options = EngineOptions(max_context=CONTEXT, probe_s=3600.0)
    return Engine(executor, tokenizer, limits, options, drafter, recovery=recovery)


def answer(engine: Engine, requests: SequenceOf[GenerationRequest]) -> list[list[Output]]:
    """Return the outputs of requests that run at once, in the order of each request and choice."""
    heard: list[queue.SimpleQueue[Output]] = [queue.SimpleQueue() for _ in requests]
    for request, outputs in zip(requests, heard, strict=True):
        engine.submit(request, outputs.put)
    told = []
    for request, outputs in zip(requests, heard, strict=True):
        found: list[Output] = []
        while sum(isinstance(output, FinishOutput) for output in found) < request.num_choices:
            found.append(outputs.get(timeout=60))
            assert not isinstance(found[-1], ErrorOutput)
        # choices run side by side, and which of them is first says nothing
        found.sort(key=lambda output: getattr(output, "choice", -1))
        told.append([_without_cache(output) for output in found])
    return told


def _without_cache(output: Output) -> Output:
    return replace(output, cached_tokens=0) if isinstance(output, FinishOutput) else output


def run(
    requests: SequenceOf[GenerationRequest], limits: SchedulerLimits, depth: int, drafter: Drafter | None
) -> tuple[list[list[Output]], Engine]:
    engine = engine_of(CheckingExecutor(limits.groups[0].num_blocks, depth), limits, drafter)
    engine.start()
    try:
        return answer(engine, requests), engine
    finally:
        engine.close()


def whole_answers(requests: SequenceOf[GenerationRequest], told: SequenceOf[list[Output]]) -> list[list[int]]:
    found = []
    for request, outputs in zip(requests, told, strict=True):
        for choice in range(request.num_choices):
            tokens = [o.token_id for o in outputs if isinstance(o, TokenOutput) and o.choice == choice]
            found.append([*request.prompt_ids, *tokens])
    return found


prompts = st.one_of(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
    st.tuples(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3), st.integers(1, 8)).map(
        lambda pair: pair[0] * pair[1]
    ),
)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 1.0, 2.0]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 1.0]),
    seed=st.integers(0, 5),
    logit_bias=st.sampled_from([{}, {}, {7: 8.0, 9: -100.0}]),
    logprobs=st.sampled_from([None, 0, 3]),
)


def with_rules(request: GenerationRequest, **rules: Any) -> GenerationRequest:
    """Add rules that leave nothing to sample or ask for more than fits, or none."""
    ruled = replace(request, **{**rules, "min_tokens": min(rules["min_tokens"], request.max_tokens)})
    try:
        check_restrictions(ruled, FakeTokenizer.eos_ids, VOCAB)
    except RequestError:
        return request
    return ruled


plain_requests = st.builds(
    GenerationRequest,
    prompt_ids=prompts.map(tuple),
    params=params,
    max_tokens=st.integers(1, 40),
    stop=st.sampled_from([(), ("5",), ("A", "BC")]),
    ignore_eos=st.booleans(),
    num_choices=st.sampled_from([1, 1, 3]),
    prompt_logprobs=st.sampled_from([None, None, None, 2]),
)
tokens_of = st.integers(3, VOCAB - 1)
requests_of = plain_requests | st.builds(
    with_rules,
    plain_requests,
    min_tokens=st.integers(0, 20),
    stop_token_ids=st.frozensets(tokens_of, max_size=6),
    allowed_token_ids=st.just(()) | st.lists(tokens_of, min_size=2, max_size=8).map(tuple),
    bad_words=st.lists(st.lists(tokens_of, min_size=1, max_size=3).map(tuple), max_size=6).map(tuple),
)


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(requests_of, min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(20, 64),
    st.sampled_from([9, 24, 64]),
    st.booleans(),
    st.integers(0, 1 << 32),
)
def test_whatever_is_guessed_the_outputs_are_the_same(
    requests: list[GenerationRequest],
    depth: int,
    num_blocks: int,
    max_step_tokens: int,
    prefix_cache: bool,
    luck: int,
) -> None:
    limits = replace(
        LIMITS,
        groups=(GroupLimits(num_blocks),),
        max_step_tokens=max_step_tokens,
        micro_batches=depth,
        prefix_cache=prefix_cache,
    )
    expected, _ = run(requests, limits, depth, None)
    fortune = Fortune(Random(luck), whole_answers(requests, expected))
    told, engine = run(requests, limits, depth, fortune)
    assert told == expected
    stats = engine.stats()
    assert stats.free_blocks == stats.num_blocks
    assert stats.accepted_tokens <= stats.drafted_tokens


@pytest.mark.parametrize("fail_at", range(3, 15))
def test_stages_that_are_lost_while_they_check_guesses_change_nothing(fail_at: int) -> None:
    params = SamplingParams(temperature=1.0, seed=3, logit_bias={9: 12.0})
    requests = [GenerationRequest((1, 2, i), params, max_tokens=40, ignore_eos=True) for i in range(3)]
    limits = replace(LIMITS, micro_batches=2)
    expected, _ = run(requests, limits, 2, None)
    executor = CheckingExecutor(limits.groups[0].num_blocks, 2)
    executor.fail_at = fail_at
    others = NewStages(
        CheckingExecutor(limits.groups[0].num_blocks), replace(limits, micro_batches=1), CONTEXT
    )
    recovery = FakeRecovery([others])
    recovery.gate.set()
    engine = engine_of(executor, limits, LookupDrafter(8), recovery)
    engine.start()
    try:
        assert answer(engine, requests) == expected
        assert len(recovery.losses) == 1
        assert engine.stats().accepted_tokens > 0
    finally:
        engine.close()


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_repetition_takes_fewer_steps_and_says_the_same(depth: int, temperature: float) -> None:
    # a bias towards one token makes a text that repeats itself, whatever the model would say
    params = SamplingParams(temperature=temperature, seed=3, logit_bias={9: 14.0})
    requests = [GenerationRequest((1, 2, i), params, max_tokens=60, ignore_eos=True) for i in range(3)]
    limits = replace(LIMITS, micro_batches=depth)
    expected, plain = run(requests, limits, depth, None)
    told, guessing = run(requests, limits, depth, LookupDrafter(8))
    assert told == expected
    stats = guessing.stats()
    assert stats.steps < plain.stats().steps / 2
    assert stats.drafted_tokens >= stats.accepted_tokens > 100
    assert plain.stats().drafted_tokens == 0


def scheduled_rows(scheduler: Scheduler) -> list[tuple[int, int]]:
    scheduled = scheduler.schedule()
    assert scheduled is not None
    scheduler.collected(scheduled)
    parts = zip(scheduled.step.rows, scheduled.sequences, scheduled.drafts, strict=True)
    for row, sequence, drafts in parts:
        sequence.tokens += [3] * bool(row.num_outputs)
        if drafts:
            scheduler.keep(sequence, len(drafts), 0)
    return [(row.num_tokens, row.num_outputs) for row in scheduled.step.rows]


class Eager:
    """Guess as much as it may."""

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        return [1] * max_tokens

    def learn(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None: ...

    def forget(self, sequence: Sequence) -> None: ...


def decoding(limits: SchedulerLimits, count: int, **changes: Any) -> Scheduler:
    """Make sequences of three tokens each that decode from the next step on."""
    scheduler = Scheduler(limits, drafter=Eager())
    sequences = [Sequence((1, 2, 3), **{"max_tokens": 100, **changes}) for _ in range(count)]
    scheduler.add(sequences)
    while any(sequence.num_generated == 0 for sequence in sequences):
        scheduled_rows(scheduler)
    return scheduler


def test_guesses_take_no_place_in_the_step_from_another_stream() -> None:
    scheduler = decoding(replace(LIMITS, max_step_tokens=10), 8)
    for _ in range(5):
        rows = scheduled_rows(scheduler)
        assert len(rows) == 8, "every stream goes on in every step"
        assert sum(num_tokens for num_tokens, _ in rows) <= 10


def test_many_streams_share_what_may_be_guessed_in_a_step() -> None:
    limits = replace(LIMITS, groups=(GroupLimits(1024),), max_step_tokens=512, max_batch=64, max_drafts=16)
    for count, drafts in ((1, 16), (4, 4), (7, 2), (16, 1), (17, 0), (40, 0)):
        rows = scheduled_rows(decoding(limits, count))
        assert rows == [(1 + drafts, 1 + drafts)] * count


def test_guesses_cost_nobody_blocks() -> None:
    limits = replace(LIMITS, groups=(GroupLimits(6),), max_step_tokens=64)
    scheduler = decoding(limits, 3, max_tokens=21)
    for _ in range(4):
        rows = scheduled_rows(scheduler)
    assert scheduler.num_preempted == 0, "8 tokens of each fit as long as no guess takes another's block"
    assert max(rows) > (1, 1), "what is nobody's may be guessed into"


def test_no_more_is_guessed_than_may_be_said() -> None:
    rows = scheduled_rows(decoding(replace(LIMITS, max_step_tokens=64), 1, max_tokens=4))
    assert rows == [(3, 3)], "one token was said, three more may be, and the last of them is sampled"


def test_nothing_is_guessed_behind_the_room_that_a_loss_has_left() -> None:
    scheduler = decoding(replace(LIMITS, max_step_tokens=64), 1)
    scheduler.running[0].wall = len(scheduler.running[0].tokens) + 3
    assert scheduled_rows(scheduler) == [(3, 3)]


def test_prompts_whose_every_token_is_scored_are_not_guessed_at() -> None:
    scheduler = decoding(LIMITS, 1, all_outputs=True)
    assert scheduled_rows(scheduler) == [(1, 1)]
