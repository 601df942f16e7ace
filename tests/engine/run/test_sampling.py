"""What the owner of the output is asked and answers: the same sample on both sides, and no lie accepted."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.engine.kv.limits import GroupLimits, SchedulerLimits
from convoy.engine.requests.choice import make_choices
from convoy.engine.requests.request import GenerationRequest
from convoy.engine.run.sampling import answer_of, job_of, outcome_of, request_of
from convoy.errors import PeerError, StepError
from convoy.model.sampling.output_rows import (
    GREEDY,
    SampleJob,
    SampleResult,
    distinct,
    rows_with_state,
    sample_all,
    sample_row,
    with_states,
)
from convoy.model.sampling.params import SamplingParams
from convoy.model.text.tokens import Tokenizer
from convoy.wire.codec import encode_message
from convoy.wire.frame import MAX_PAYLOAD_BYTES
from convoy.wire.messages.control import FrameType, Row, SampleReply, SampleRequest, Step
from support.examples import examples
from support.fake_tokenizer import FakeTokenizer

VOCAB = 40
WIDTH = 6
LOGITS = np.random.default_rng(3).normal(0, 4, VOCAB).astype(np.float32)

params_of = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.9]),
    frequency_penalty=st.sampled_from([0.0, -0.4]),
    seed=st.integers(0, 2**63 - 1),
    logit_bias=st.sampled_from([{}, {3: 5.0, 39: -2.5}]),
    logprobs=st.sampled_from([None, 0, 4]),
)
ids = st.lists(st.integers(0, VOCAB - 1), max_size=12)
samples = st.builds(
    SampleJob,
    params_of,
    st.integers(0, 3),
    st.integers(0, 99),
    ids,
    ids,
    st.none() | st.integers(0, 39),
    st.booleans(),
    st.lists(st.integers(0, 9), max_size=5),
    st.lists(st.integers(10, VOCAB - 1), max_size=5),
    # Each of them leaves some of the tokens that the two lists before leave.
    st.sampled_from([b"", b"\xff" * 5 + b"\0" * 3, b"\xff\x03\xaa" + b"\0" * 5]),
)


def over_the_wire(asked: SampleJob, logits: np.ndarray[Any, Any]) -> SampleResult:
    request = msgspec.msgpack.decode(msgspec.msgpack.encode(request_of(asked)), type=SampleRequest)
    answer = answer_of(sample_row(logits, job_of(request, VOCAB)))
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=SampleReply)
    return outcome_of(sent, asked, VOCAB, WIDTH)


def test_a_step_whose_samples_all_look_back_on_a_long_context_fits_in_its_frame() -> None:
    """One that does not would end the engine, and any client could ask for it."""
    limits = SchedulerLimits(groups=(GroupLimits(1),), block_size=16)
    params = SamplingParams(repetition_penalty=1.1)
    back = SampleJob(
        *(params, 0, 131_072), prompt_ids=range(65_536), generated_ids=range(65_536), mask=bytes(32 * 1024)
    )
    step = Step(0, [], [], [], b"", [request_of(back)] * (limits.max_batch + limits.max_drafts))
    assert len(encode_message(step)) < MAX_PAYLOAD_BYTES[FrameType.STEP]


@settings(derandomize=True, max_examples=examples(400))
@given(samples)
def test_a_peer_samples_the_token_that_the_head_would_have_sampled(asked: SampleJob) -> None:
    here, there = sample_row(LOGITS, asked), over_the_wire(asked, LOGITS)
    assert here.sampled.token_id == there.sampled.token_id
    assert here.sampled.top == there.sampled.top
    assert here.sampled.rank == there.sampled.rank
    assert math.isnan(here.sampled.logprob) == math.isnan(there.sampled.logprob)
    assert math.isnan(here.sampled.logprob) or here.sampled.logprob == there.sampled.logprob
    assert (there.logits is not None) == asked.wants_logits
    assert there.logits is None or (there.logits == LOGITS).all()


def test_tokens_go_only_where_a_penalty_looks_back() -> None:
    history = (distinct([7, 7, 5]), [9, 9])
    plain = request_of(SampleJob(SamplingParams(logit_bias={1: 2.0}), 0, 5, *history))
    assert (plain.prompt, plain.generated) == (b"", b"")
    counted = request_of(SampleJob(SamplingParams(frequency_penalty=1.0), 0, 5, *history))
    assert (len(counted.prompt), len(counted.generated)) == (0, 8)
    repeated = request_of(SampleJob(SamplingParams(repetition_penalty=1.1), 0, 5, *history))
    assert (len(repeated.prompt), len(repeated.generated)) == (8, 8), "each token of the prompt once"


def test_a_prompt_is_gone_through_once_for_a_request_however_many_tokens_it_samples() -> None:
    params = SamplingParams(repetition_penalty=1.3)
    asked = GenerationRequest((7, 3, 7, 9), params, max_tokens=9, num_choices=2)
    tokenizer = cast(Tokenizer, FakeTokenizer())
    choices = make_choices(asked, tokenizer, lambda _output: None, share_across_keys=False)
    found = []
    for _ in range(3):
        for choice in choices:
            row = Row(0, len(choice.sequence.tokens) - 1, 1, 1, b"", b"")
            found += choice.sample_jobs(row, ())
            choice.sequence.tokens.append(4)
    assert [list(one.prompt_ids) for one in found] == [[3, 7, 9]] * 6
    assert len({id(one.prompt_ids) for one in found}) == 1
    assert list(found[-1].generated_ids) == [4, 4]
    plain = make_choices(
        replace(asked, params=SamplingParams()), tokenizer, lambda _output: None, share_across_keys=False
    )
    assert plain[0].prompt_seen == ()


def test_logits_that_give_no_token_fail_this_sample_alone() -> None:
    outcome = over_the_wire(SampleJob(SamplingParams(), 0, 5), np.full(VOCAB, np.nan, dtype=np.float32))
    assert isinstance(outcome.error, StepError)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"token_id": VOCAB}, "a token outside the vocabulary of 40"),
        ({"token_id": -1}, "a token outside the vocabulary of 40"),
        ({"top": [(0, -1.0), (VOCAB, -2.0)]}, "a token outside the vocabulary of 40"),
        ({"top": [(0, -1.0)]}, "1 alternatives, expected 2"),
        ({"top": [(0, -1.0), (0, -1.0)]}, "2 alternatives, expected 2, all different"),
        ({"top": [(i, -1.0) for i in range(30)]}, "30 alternatives, expected 2"),
        ({"logprob": math.nan}, "a log-probability that is not finite"),
        ({"top": [(0, math.inf), (1, -2.0)]}, "a log-probability that is not finite"),
        ({"logits": b""}, "0 bytes of logits, expected 160"),
        ({"logits": bytes(4 * VOCAB + 4)}, "164 bytes of logits, expected 160"),
        ({"logits": np.full(VOCAB, np.inf, dtype="<f4").tobytes()}, "logits that are not finite"),
    ],
)
def test_an_answer_that_no_such_sample_has_is_refused(changes: dict[str, Any], expected: str) -> None:
    asked = SampleJob(SamplingParams(logprobs=2), 0, 5, wants_logits=True)
    answer = answer_of(sample_row(LOGITS, asked))
    outcome_of(answer, asked, VOCAB, WIDTH)
    with pytest.raises(PeerError, match=expected):
        outcome_of(msgspec.structs.replace(answer, **changes), asked, VOCAB, WIDTH)


def test_a_job_that_wants_a_state_samples_nothing_and_gets_it_over_the_wire() -> None:
    asked = replace(GREEDY, wants_state=True)
    state = np.arange(WIDTH, dtype=np.float32)
    request = msgspec.msgpack.decode(msgspec.msgpack.encode(request_of(asked)), type=SampleRequest)
    there = job_of(request, VOCAB)
    assert rows_with_state([there, GREEDY]) == [0]
    # Logits that give no token are no failure, because none is sampled.
    bad = np.full((1, VOCAB), np.nan, dtype=np.float32)
    (result,) = with_states(sample_all(bad, [there]), [there], lambda rows: state[None][rows])
    assert result.error is None
    found = outcome_of(answer_of(result), asked, VOCAB, WIDTH)
    assert found.state is not None
    assert found.state.tolist() == state.tolist()
    (failed,) = with_states(sample_all(bad, [there]), [there], lambda rows: state[None][rows] * np.nan)
    assert isinstance(failed.error, StepError)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"state": b""}, "0 bytes of final states, expected 24"),
        ({"state": bytes(4 * WIDTH + 4)}, "28 bytes of final states, expected 24"),
        ({"state": np.full(WIDTH, np.nan, dtype="<f4").tobytes()}, "final states that are not finite"),
        ({"token_id": 3}, "a sample, and only a final state was asked for"),
        ({"logits": bytes(4 * VOCAB)}, "a sample, and only a final state was asked for"),
    ],
)
def test_an_answer_that_is_no_final_state_is_refused(changes: dict[str, Any], expected: str) -> None:
    asked = replace(GREEDY, wants_state=True)
    answer = SampleReply(0, 0.0, [], b"", "", 0, bytes(4 * WIDTH))
    outcome_of(answer, asked, VOCAB, WIDTH)
    with pytest.raises(PeerError, match=expected):
        outcome_of(msgspec.structs.replace(answer, **changes), asked, VOCAB, WIDTH)


def test_a_state_that_was_not_asked_for_is_refused() -> None:
    answer = msgspec.structs.replace(answer_of(sample_row(LOGITS, GREEDY)), state=bytes(4 * WIDTH))
    with pytest.raises(PeerError, match="24 bytes of a final state, and none was asked for"):
        outcome_of(answer, GREEDY, VOCAB, WIDTH)


@pytest.mark.parametrize("rules", [{"banned": [7]}, {"allowed": [6, 8]}, {"mask": b"\x7f\xff" + b"\0" * 6}])
def test_an_answer_with_a_token_that_was_not_allowed_is_refused(rules: dict[str, Any]) -> None:
    asked = SampleJob(SamplingParams(), 0, 5, **rules)
    answer = answer_of(sample_row(LOGITS, asked))
    outcome_of(answer, asked, VOCAB, WIDTH)
    with pytest.raises(PeerError, match="a token that was not allowed"):
        outcome_of(msgspec.structs.replace(answer, token_id=7), asked, VOCAB, WIDTH)


@pytest.mark.parametrize(("score", "rank"), [(7, 0), (7, VOCAB + 1), (7, -1), (None, 1)])
def test_an_answer_with_a_rank_that_no_token_has_is_refused(score: int | None, rank: int) -> None:
    asked = SampleJob(SamplingParams(logprobs=0), 0, 5, score=score)
    answer = answer_of(sample_row(LOGITS, asked))
    with pytest.raises(PeerError, match=f"has the rank {rank}, expected"):
        outcome_of(msgspec.structs.replace(answer, rank=rank), asked, VOCAB, WIDTH)


def test_an_answer_to_another_question_is_refused() -> None:
    asked = SampleJob(SamplingParams(logprobs=0), 0, 5, score=7)
    answer = answer_of(sample_row(LOGITS, asked))
    with pytest.raises(PeerError, match="scores another token"):
        outcome_of(answer, replace(asked, score=8), VOCAB, WIDTH)
    unasked = msgspec.structs.replace(answer, logits=bytes(4 * VOCAB))
    with pytest.raises(PeerError, match="160 bytes of logits, and none were asked for"):
        outcome_of(unasked, asked, VOCAB, WIDTH)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"temperature": 9.0}, "a parameter out of its range: temperature"),
        ({"logit_bias": [(VOCAB, 1.0)]}, "a parameter out of its range: logit_bias"),
        ({"score": VOCAB}, "names a token, choice or position that does not exist"),
        ({"choice": -1}, "names a token, choice or position that does not exist"),
        ({"prompt": b"123"}, "3 bytes of tokens"),
        ({"generated": b"\xff\xff\xff\xff"}, "a token outside the vocabulary of 40"),
        ({"allowed": b"\x28\0\0\0"}, "a token outside the vocabulary of 40"),
        ({"banned": b"\x28\0\0\0"}, "a token outside the vocabulary of 40"),
        ({"banned": b"12"}, "2 bytes of tokens"),
        ({"mask": b"\xff" * 5}, "a mask of 5 bytes, expected 8"),
        ({"mask": b"\xff" * 65_536}, "a mask of 65536 bytes, expected 8"),
        ({"mask": b"\0" * 5 + b"\1\0\0"}, "a mask with a token outside the vocabulary of 40"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(changes: dict[str, Any], expected: str) -> None:
    request = msgspec.structs.replace(request_of(SampleJob(SamplingParams(), 0, 5)), **changes)
    with pytest.raises(StepError, match=expected):
        job_of(request, VOCAB)
