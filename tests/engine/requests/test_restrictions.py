"""Which tokens a request may sample, token by token, and which requests are refused."""

from __future__ import annotations

import queue
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest

from convoy.engine.engine import Engine, EngineOptions
from convoy.engine.kv.limits import GroupLimits, SchedulerLimits
from convoy.engine.outputs import ErrorOutput, FinishOutput, Output, TokenOutput
from convoy.engine.requests.request import GenerationRequest
from convoy.engine.requests.restrictions import Restrictions
from convoy.engine.run.executor import NewStages
from convoy.errors import RequestError
from convoy.model.sampling.params import SamplingParams
from convoy.model.text.tokens import Tokenizer
from engine.test_recovery import FakeRecovery
from support.fake_executor import VOCAB, FakeExecutor
from support.fake_tokenizer import EOS, FakeTokenizer

LIMITS = SchedulerLimits(groups=(GroupLimits(64),), block_size=4, max_batch=8, max_step_tokens=24)
ASKED = GenerationRequest((1, 2, 5), SamplingParams(temperature=2.0, seed=5), max_tokens=30)
CONTEXT = 200


def answer(
    request: GenerationRequest, executor: FakeExecutor | None = None, recovery: FakeRecovery | None = None
) -> list[Output]:
    """Return all outputs of choice 0."""
    told: queue.SimpleQueue[Output] = queue.SimpleQueue()
    engine = Engine(
        executor or FakeExecutor(),
        cast(Tokenizer, FakeTokenizer()),
        LIMITS,
        EngineOptions(max_context=CONTEXT),
        recovery=recovery,
    )
    engine.start()
    found: list[Output] = []
    try:
        engine.submit(request, told.put)
        while not found or not isinstance(found[-1], FinishOutput | ErrorOutput):
            output = told.get(timeout=60.0)
            if getattr(output, "choice", 0) == 0:
                found.append(output)
    finally:
        engine.close()
    return found


def tokens(found: list[Output]) -> list[int]:
    return [output.token_id for output in found if isinstance(output, TokenOutput)]


def text(found: list[Output]) -> str:
    return "".join(output.text for output in found if isinstance(output, TokenOutput | FinishOutput))


def reason(found: list[Output]) -> str:
    assert isinstance(found[-1], FinishOutput)
    return found[-1].reason


def test_a_stop_token_ends_the_answer_and_is_not_shown() -> None:
    free = tokens(answer(replace(ASKED, ignore_eos=True)))
    stop = free[7]
    assert stop not in free[:7]
    found = answer(replace(ASKED, ignore_eos=True, stop_token_ids=frozenset({stop})))
    assert tokens(found) == free[:7]
    assert reason(found) == "stop"
    assert text(found) == FakeTokenizer().decode(free[:7])


def test_no_token_ends_the_answer_before_min_tokens() -> None:
    """End of text is what this model nearly always says."""
    biased = replace(ASKED, params=replace(ASKED.params, logit_bias={EOS: 100.0, 20: 90.0}))
    assert tokens(answer(biased)) == []
    for stops in ((), (20,)):
        found = answer(replace(biased, min_tokens=9, stop_token_ids=frozenset(stops)))
        assert len(tokens(found)) == 9
        assert not {EOS, *stops} & set(tokens(found))
        assert reason(found) == "stop"


def test_end_of_text_is_not_sampled_before_min_tokens_even_where_it_ends_nothing() -> None:
    biased = replace(ASKED.params, logit_bias={EOS: 100.0})
    found = answer(replace(ASKED, params=biased, min_tokens=9, max_tokens=12, ignore_eos=True))
    assert EOS not in tokens(found)[:9]
    assert tokens(found)[9:] == [EOS] * 3


def test_a_stop_string_does_not_count_before_min_tokens() -> None:
    one = replace(ASKED, allowed_token_ids=(20,), stop=(chr(ord("0") + 20) * 2,), ignore_eos=True)
    assert len(tokens(answer(one))) == 2
    found = answer(replace(one, min_tokens=7))
    assert len(tokens(found)) == 8
    assert reason(found) == "stop"
    assert text(found) == chr(ord("0") + 20) * 6, "the one that counts begins before and ends after"


def test_only_allowed_tokens_are_sampled() -> None:
    found = answer(replace(ASKED, allowed_token_ids=(40, 30, 40, 50)))
    assert set(tokens(found)) == {30, 40, 50}
    assert reason(found) == "length"


def test_a_bad_word_is_never_complete_in_what_is_generated() -> None:
    """With two tokens, and one pair of them banned, the answer is all of the other once that is said."""
    pair = replace(ASKED, allowed_token_ids=(30, 40), max_tokens=60)
    free = tokens(answer(pair))
    assert (30, 40) in pairwise(free)
    found = tokens(answer(replace(pair, bad_words=((30, 40),))))
    assert (30, 40) not in pairwise(found)
    assert 30 in found
    single = tokens(answer(replace(pair, bad_words=((30,),))))
    assert set(single) == {40}


def test_a_bad_word_that_begins_in_the_prompt_is_not_meant() -> None:
    asked = replace(ASKED, prompt_ids=(1, 30), allowed_token_ids=(40, 41, 42), max_tokens=20)
    assert tokens(answer(replace(asked, bad_words=((30, 40), (30, 41))))) == tokens(answer(asked))


def test_every_choice_keeps_to_the_rules() -> None:
    told: queue.SimpleQueue[Output] = queue.SimpleQueue()
    engine = Engine(
        FakeExecutor(), cast(Tokenizer, FakeTokenizer()), LIMITS, EngineOptions(max_context=CONTEXT)
    )
    engine.start()
    biased = replace(ASKED.params, logit_bias={EOS: 100.0})
    asked = replace(ASKED, params=biased, num_choices=3, min_tokens=4, allowed_token_ids=(EOS, 30, 40))
    try:
        engine.submit(asked, told.put)
        found = [told.get(timeout=60.0) for _ in range(15)]
    finally:
        engine.close()
    assert sum(isinstance(one, FinishOutput) for one in found) == 3
    for choice in range(3):
        said = [one.token_id for one in found if isinstance(one, TokenOutput) and one.choice == choice]
        assert len(said) == 4
        assert set(said) <= {30, 40}


@pytest.mark.parametrize("fail_at", [3, 6, 10])
def test_a_loss_in_mid_answer_changes_nothing(fail_at: int) -> None:
    asked = replace(
        ASKED,
        params=replace(ASKED.params, logit_bias={EOS: 12.0, 30: 8.0, 40: 8.0}),
        min_tokens=12,
        bad_words=((30, 40), (40,)),
        stop=("N",),
    )
    expected = answer(asked)
    executor = FakeExecutor(fail_at=fail_at)
    recovery = FakeRecovery([NewStages(FakeExecutor(), LIMITS, CONTEXT)])
    recovery.gate.set()
    assert answer(asked, executor, recovery) == expected
    assert len(recovery.losses) == 1


@pytest.mark.parametrize(
    ("rules", "param", "expected"),
    [
        ({"min_tokens": 31}, "min_tokens", "min_tokens is 31, expected 0 to 30"),
        ({"min_tokens": -1}, "min_tokens", "min_tokens is -1, expected 0 to 30"),
        ({"stop_token_ids": frozenset({VOCAB})}, "stop_token_ids", f"expected ids below {VOCAB}"),
        ({"stop_token_ids": frozenset({-1})}, "stop_token_ids", f"expected ids below {VOCAB}"),
        ({"allowed_token_ids": (VOCAB,)}, "allowed_token_ids", f"expected ids below {VOCAB}"),
        ({"allowed_token_ids": (3,) * 1025}, "allowed_token_ids", "1025 ids, and the limit is 1024"),
        ({"bad_words": tuple((i,) for i in range(VOCAB))}, "bad_words", f"each of the {VOCAB} tokens"),
        ({"bad_words": ((7, 3), (5,)), "allowed_token_ids": (3, 5)}, "bad_words", "each of the 2 tokens"),
        ({"min_tokens": 1, "allowed_token_ids": (EOS,)}, "min_tokens", "each of the 1 tokens"),
        (
            {"min_tokens": 1, "stop_token_ids": frozenset(range(VOCAB))},
            "min_tokens",
            f"each of the {VOCAB} tokens",
        ),
    ],
)
def test_rules_that_cannot_be_kept_are_refused(rules: dict[str, Any], param: str, expected: str) -> None:
    with pytest.raises(RequestError, match=expected) as caught:
        answer(replace(ASKED, **rules))
    assert caught.value.param == param


def test_what_goes_to_the_owner_of_the_output_is_one_list() -> None:
    rules = Restrictions.of(
        replace(ASKED, min_tokens=2, allowed_token_ids=(9, 5, 7, EOS), bad_words=((1, 5), (8,))),
        frozenset({EOS}),
    )
    assert rules.reach == 1
    assert rules.next(0, []) == ((5, 7, 9), ())
    assert rules.next(1, [1]) == ((7, 9), ())
    assert rules.next(2, [2]) == ((5, 7, 9, EOS), ())
    free = replace(rules, allowed=())
    assert free.next(1, [1]) == ((), (5, 8, EOS))
    assert not Restrictions.of(ASKED, frozenset({EOS}))
