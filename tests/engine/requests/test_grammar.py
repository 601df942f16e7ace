"""An answer keeps to its grammar through guesses, preemption, replay and a loss, and ends with it."""

from __future__ import annotations

import itertools
import queue
import re
import threading
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import fields, replace
from typing import cast

import pytest

from convoy.engine.engine import Engine, EngineOptions
from convoy.engine.kv.limits import GroupLimits, SchedulerLimits
from convoy.engine.outputs import ErrorOutput, FinishOutput, Output, TokenOutput
from convoy.engine.requests.request import GenerationRequest
from convoy.engine.run.executor import NewStages
from convoy.engine.scheduler import Drafter
from convoy.engine.sequence import Sequence
from convoy.engine.speculation import GrammarDrafter, LookupDrafter
from convoy.errors import RequestError
from convoy.model.constraints.compiler import GrammarLimits
from convoy.model.constraints.matcher import AnswerLimits, CompiledGrammar, Matcher
from convoy.model.sampling.output_rows import SampleJob
from convoy.model.sampling.params import SamplingParams
from convoy.model.text.tokens import Tokenizer
from convoy.wire.messages.control import Step
from engine.test_recovery import FakeRecovery
from support.fake_executor import FakeExecutor
from support.fake_tokenizer import EOS, FakeTokenizer
from support.grammars import letters

LIMITS = SchedulerLimits(groups=(GroupLimits(64),), block_size=4, max_batch=8, max_step_tokens=24)
PATTERN = "[A-C]{2}(HELLO|WORLD)[0-9]{3,5}(ABCABCABC){2}"
ASKED = GenerationRequest(
    (1, 2, 5), SamplingParams(temperature=2.0, seed=5), max_tokens=60, grammar=letters(PATTERN)
)


class Outcome:
    """Hold the client's part of each choice, and how the engine got there."""

    def __init__(self, outputs: list[Output], executor: FakeExecutor, engine: Engine) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.reasons: dict[int, str] = {}
        self.errors = [output.error for output in outputs if isinstance(output, ErrorOutput)]
        for output in outputs:
            if isinstance(output, TokenOutput):
                self.tokens.setdefault(output.choice, []).append(output.token_id)
            elif isinstance(output, FinishOutput):
                self.reasons[output.choice] = output.reason
        self.num_steps = len(executor.steps)
        self.stats = engine.stats()

    def text(self, choice: int = 0) -> str:
        return FakeTokenizer().decode(self.tokens[choice])


def run(
    request: GenerationRequest,
    drafter: Drafter | None = None,
    *,
    executor: FakeExecutor | None = None,
    limits: SchedulerLimits = LIMITS,
    recovery: FakeRecovery | None = None,
) -> Outcome:
    told: queue.SimpleQueue[Output] = queue.SimpleQueue()
    executor = executor or FakeExecutor()
    engine = Engine(
        *(executor, cast(Tokenizer, FakeTokenizer()), limits, EngineOptions(max_context=200), drafter),
        recovery=recovery,
    )
    engine.start()
    found: list[Output] = []
    try:
        engine.submit(request, told.put)
        while sum(isinstance(one, FinishOutput | ErrorOutput) for one in found) < request.num_choices:
            found.append(told.get(timeout=60.0))
            if isinstance(found[-1], ErrorOutput):
                break
    finally:
        engine.close()
    return Outcome(found, executor, engine)


def test_an_answer_matches_its_grammar_and_ends_with_it() -> None:
    done = run(ASKED)
    assert re.fullmatch(PATTERN, done.text())
    assert done.reasons == {0: "stop"}


def test_each_choice_follows_the_grammar_by_itself() -> None:
    done = run(replace(ASKED, num_choices=3))
    texts = {done.text(choice) for choice in range(3)}
    assert len(texts) > 1
    assert all(re.fullmatch(PATTERN, text) for text in texts)


def test_an_answer_that_ends_with_length_is_the_beginning_of_a_match() -> None:
    whole = run(ASKED).text()
    done = run(replace(ASKED, max_tokens=9))
    assert done.text() == whole[:9]
    assert done.reasons == {0: "length"}


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_guesses_change_no_token_and_save_steps(temperature: float) -> None:
    asked = replace(ASKED, params=replace(ASKED.params, temperature=temperature))
    plain = run(asked)
    forced = run(asked, GrammarDrafter())
    both = run(asked, GrammarDrafter(LookupDrafter(8)))
    assert plain.tokens == forced.tokens == both.tokens
    # HELLO or WORLD is forced behind its first letter, and all of the 18 letters at the end.
    assert forced.num_steps < plain.num_steps - 15
    # A forced token is certain. The one that ends the answer is not counted as a draft that others follow.
    assert forced.stats.drafted_tokens == forced.stats.accepted_tokens + 1 > 15


class Stubborn:
    """Guess the same tokens, whatever the text is."""

    def propose(self, _sequence: object, max_tokens: int) -> list[int]:
        return [ord(letter) - ord("0") for letter in "AZZZ"][:max_tokens]

    def learn(self, _sequence: object, num_drafts: int, num_accepted: int) -> None:
        """Learn nothing."""

    def forget(self, _sequence: object) -> None:
        """Keep nothing."""


def test_a_guess_outside_the_grammar_is_never_sent() -> None:
    plain = run(replace(ASKED, grammar=letters("[A-C]{12}")))
    done = run(replace(ASKED, grammar=letters("[A-C]{12}")), GrammarDrafter(Stubborn()))
    assert done.tokens == plain.tokens
    assert 0 < done.stats.drafted_tokens <= 12, "of each guess only its A"


def test_forced_guesses_are_shorter_after_a_refusal_and_longer_after_a_whole_one() -> None:
    sequence = Sequence((1,), 60, all_outputs=False, salt=b"", matcher=letters("[A]{32}").matcher())
    drafter = GrammarDrafter()
    lengths = []
    for accepted in (0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0):
        lengths.append(len(drafter.propose(sequence, 24)))
        drafter.learn(sequence, lengths[-1], int(accepted * lengths[-1]))
    assert lengths == [24, 12, 6, 12, 24, 24, 24]


def test_a_forced_guess_is_never_shorter_than_one_token() -> None:
    sequence = Sequence((1,), 60, all_outputs=False, salt=b"", matcher=letters("[A]{32}").matcher())
    drafter = GrammarDrafter()
    for _ in range(10):
        drafter.learn(sequence, len(drafter.propose(sequence, 24)), 0)
    assert len(drafter.propose(sequence, 24)) == 1


def test_without_a_grammar_the_other_drafter_decides_alone() -> None:
    free = replace(ASKED, grammar=None, ignore_eos=True)
    assert run(free, GrammarDrafter(LookupDrafter(8))).tokens == run(free, LookupDrafter(8)).tokens
    assert run(free, GrammarDrafter()).stats.drafted_tokens == 0


@pytest.mark.parametrize("drafter", [None, GrammarDrafter(LookupDrafter(4))], ids=["plain", "guesses"])
def test_a_preempted_answer_goes_on_with_the_same_tokens(drafter: Drafter | None) -> None:
    asked = replace(ASKED, num_choices=3)
    calm = run(asked)
    # Room for one whole answer and a half.
    tight = run(asked, drafter, limits=replace(LIMITS, groups=(GroupLimits(16),)))
    assert tight.stats.preempted > 0
    assert tight.tokens == calm.tokens


def test_a_loss_in_the_middle_changes_no_token() -> None:
    whole = run(ASKED)
    gate = threading.Event()
    gate.set()
    recovery = FakeRecovery([NewStages(FakeExecutor(), LIMITS, 200, same_bits=True)], gate)
    done = run(ASKED, executor=FakeExecutor(fail_at=9), recovery=recovery)
    assert done.stats.recoveries == 1
    assert done.tokens == whole.tokens


def test_ignore_eos_does_not_go_on_behind_a_whole_answer() -> None:
    assert run(replace(ASKED, ignore_eos=True)).tokens == run(ASKED).tokens


def test_an_open_answer_ends_where_the_model_ends_it_and_not_before_min_tokens() -> None:
    ends = replace(ASKED.params, logit_bias={EOS: 100.0})
    done = run(replace(ASKED, params=ends, grammar=letters("[A-C]+")))
    assert (len(done.tokens[0]), done.reasons[0]) == (1, "stop")
    late = run(replace(ASKED, params=ends, grammar=letters("[A-C]+"), min_tokens=7))
    assert (len(late.tokens[0]), late.reasons[0]) == (7, "stop")


def test_a_stop_string_and_log_probabilities_work_within_a_grammar() -> None:
    done = run(replace(ASKED, stop=("LO", "LD"), params=replace(ASKED.params, logprobs=2)))
    assert done.reasons == {0: "stop"}
    assert len(done.tokens[0]) == 7


def test_rules_that_leave_no_token_fail_that_request_alone() -> None:
    banned = tuple((ord(letter) - ord("0"),) for letter in "ABC")
    for rules in ({"bad_words": banned}, {"allowed_token_ids": (ord("Z") - ord("0"),)}):
        done = run(replace(ASKED, **rules))
        assert isinstance(done.errors[0], RequestError)
        assert "may be sampled" in str(done.errors[0])


def test_rules_that_contradict_the_grammar_only_off_the_drawn_path_do_no_harm() -> None:
    """Guesses run ahead of the text, and a conflict behind a refused guess is none."""
    asked = replace(ASKED, grammar=letters("(A|BZ|C){6}"), bad_words=((ord("Z") - ord("0"),),))
    plain, guessed = run(asked), run(asked, GrammarDrafter(LookupDrafter(8)))
    assert plain.tokens == guessed.tokens
    assert plain.reasons == guessed.reasons


class Deaf(FakeExecutor):
    """Sample without the masks."""

    def submit(self, step: Step, jobs: SequenceOf[SampleJob]) -> None:
        super().submit(step, [replace(job, mask=b"") for job in jobs])


def test_a_token_outside_the_grammar_fails_its_request() -> None:
    done = run(ASKED, executor=Deaf())
    assert isinstance(done.errors[0], RequestError)
    assert done.errors[0].param == "grammar"


@pytest.mark.parametrize("drafter", [None, GrammarDrafter(LookupDrafter(4))], ids=["plain", "guesses"])
def test_an_answer_ends_with_an_error_where_its_grammar_hits_a_limit(drafter: Drafter | None) -> None:
    # Each mask makes new states of the automaton, so the limit is hit in the middle of the answer.
    hungry = letters("(.*A.{14}|.*B.{13}C.*|.*D.{15})", GrammarLimits(max_states=100))
    done = run(replace(ASKED, grammar=hungry), drafter)
    assert not done.reasons
    assert len(done.tokens[0]) < ASKED.max_tokens
    assert isinstance(done.errors[0], RequestError)
    assert done.errors[0].param == "grammar"


@pytest.mark.parametrize("max_states", range(4, 89, 3))
def test_guesses_that_hit_their_limit_of_states_in_a_step_change_no_token(max_states: int) -> None:
    few = letters(PATTERN, GrammarLimits(max_guess_states=max_states))
    done = run(replace(ASKED, grammar=few), GrammarDrafter())
    assert done.tokens == run(ASKED).tokens
    assert done.reasons == {0: "stop"}


class Ticking(CompiledGrammar):
    """Let each look at the clock take one second, so that every piece of work takes one."""

    def matcher(self, clock: Callable[[], float] | None = None) -> Matcher:
        return super().matcher(clock or itertools.count().__next__)


@pytest.mark.parametrize("first_s", range(1, 11))
def test_guesses_that_use_up_their_time_in_a_step_change_no_token(first_s: int) -> None:
    """An answer earns as much as its own work takes, and its guesses take more."""
    compiled = letters(PATTERN, GrammarLimits(answer=AnswerLimits(first_s=first_s + 0.5, token_s=2.0)))
    timed = Ticking(**{one.name: getattr(compiled, one.name) for one in fields(compiled) if one.init})
    done = run(replace(ASKED, grammar=timed), GrammarDrafter())
    assert done.tokens == run(ASKED).tokens
    assert done.reasons == {0: "stop"}
