"""A matcher tells the tokens that may come next, and moves only when it is told to."""

from __future__ import annotations

import numpy as np
import pytest

from convoy.model.constraints.compiler import GrammarLimits
from convoy.model.constraints.matcher import AnswerLimits, MaskFiller, Matcher, mask_bytes
from support.grammars import ByteVocabulary, compiled


def allowed(mask: bytes) -> set[int]:
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
    return {int(one) for one in np.flatnonzero(bits)}


def masks(matcher: Matcher, drafts: list[int]) -> list[set[int]]:
    MaskFiller().fill([(matcher, drafts)])
    return [allowed(mask) for mask in matcher.masks]


def test_a_mask_has_a_bit_for_each_token_in_whole_words() -> None:
    assert [mask_bytes(size) for size in (1, 32, 33, 128_256)] == [4, 4, 8, 16_032]
    matcher = compiled("regex", "[ab]c").matcher()
    MaskFiller().fill([(matcher, ())])
    assert len(matcher.masks[0]) == mask_bytes(ByteVocabulary.vocab_size)
    ab = 258 + ByteVocabulary.WORDS.index("ab")
    assert allowed(matcher.masks[0]) == {ord("a"), ord("b")}
    assert ab not in allowed(matcher.masks[0])


def test_masks_after_drafts_are_those_of_a_matcher_that_consumed_them() -> None:
    matcher = compiled("regex", "[ab]c[de]f").matcher()
    drafts = list(b"acd")
    found = masks(matcher, drafts)
    assert found == [{*b"ab"}, {*b"c"}, {*b"de"}, {*b"f"}]
    assert masks(matcher, []) == [{*b"ab"}], "it did not move"


def test_the_masks_of_several_answers_are_those_of_each_alone() -> None:
    texts = ["[a-c]x", "zz", "[0-9]+"]
    together = [compiled("regex", text).matcher() for text in texts]
    MaskFiller().fill([(together[0], ()), (together[1], list(b"z")), (together[2], list(b"42"))])
    alone = [
        masks(compiled("regex", text).matcher(), d)
        for text, d in zip(texts, ([], [*b"z"], [*b"42"]), strict=True)
    ]
    assert [[allowed(mask) for mask in one.masks] for one in together] == alone


def test_drafts_are_allowed_up_to_the_first_that_the_grammar_refuses() -> None:
    matcher = compiled("regex", "ab[cd]").matcher()
    assert [matcher.allowed_start(list(text)) for text in (b"abc", b"abx", b"xbc", b"")] == [3, 2, 0, 0]
    assert matcher.consume(ord("a"))
    assert matcher.allowed_start([*b"bd"]) == 2


def test_a_forced_text_is_told_as_tokens_up_to_the_first_choice() -> None:
    matcher = compiled("regex", "yes(no|maybe)").matcher()
    assert matcher.forced() == [*b"yes"]
    assert all(map(matcher.consume, b"yesm"))
    assert matcher.forced() == [*b"aybe"]


def test_an_answer_is_complete_only_where_nothing_may_follow() -> None:
    matcher = compiled("regex", "ab*|cd").matcher()
    assert matcher.consume(ord("a"))
    assert not matcher.complete
    assert 256 in masks(matcher, [])[0]
    other = compiled("regex", "ab*|cd").matcher()
    assert all(map(other.consume, b"cd"))
    assert other.complete


def test_a_token_outside_the_grammar_is_not_consumed() -> None:
    assert not compiled("regex", "ab").matcher().consume(ord("b"))


def test_matchers_of_one_grammar_do_not_move_each_other() -> None:
    grammar = compiled("regex", "ab")
    first, second = grammar.matcher(), grammar.matcher()
    assert first.consume(ord("a"))
    assert masks(second, []) == [{ord("a")}]


def test_an_ambiguous_grammar_ends_before_it_holds_up_other_answers() -> None:
    # Small bounds, because the work grows with the square of the tokens.
    limits = GrammarLimits(answer=AnswerLimits(first_s=0.05, token_s=0.00001))
    matcher = compiled("lark", 'start: e\ne: e e | e e e | "a"', limits=limits).matcher()
    assert not all(matcher.consume(ord("a")) for _ in range(500))
    assert matcher.failed
    assert not matcher.native.is_error(), "the time has ended it, and no limit of the library"


def test_a_grammar_that_hits_a_limit_has_failed_and_is_not_complete() -> None:
    grammar = compiled("regex", "(.*a.{14}|.*b.{13}c.*|.*d.{15})", limits=GrammarLimits(max_states=100))
    matcher = grammar.matcher()
    assert not matcher.failed
    for token in b"abcabdaca":
        masks(matcher, [])
        if not matcher.consume(token):
            break
    assert matcher.failed
    assert not matcher.complete


class SteppingClock:
    """Advance by ``step_s`` with each look at it."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


def test_the_processor_time_of_masks_counts_against_the_answer() -> None:
    clock = SteppingClock(0.3)
    filler, matcher = MaskFiller(), compiled("regex", "a*").matcher(clock)
    filler.fill([(matcher, ())])
    filler.fill([(matcher, ())])
    filler.fill([(matcher, ())])
    assert not matcher.failed
    filler.fill([(matcher, ())])
    assert matcher.failed, "4 masks of 0.3 s take the first second"
    assert not matcher.consume(ord("a"))


def test_a_slow_step_charges_each_answer_its_own_time_from_the_next_step_on() -> None:
    wall, grammar = SteppingClock(2.0), compiled("regex", "a*")
    filler = MaskFiller(wall)
    matchers = [grammar.matcher(SteppingClock(2.0)), grammar.matcher(SteppingClock(0.0))]
    filler.fill([(one, ()) for one in matchers])
    assert not any(one.failed for one in matchers), "the first slow step cannot be divided"
    filler.fill([(one, ()) for one in matchers])
    assert [one.failed for one in matchers] == [True, False]
    assert [allowed(one.masks[0]) for one in matchers] == [{ord("a"), 256}] * 2
    wall.step_s = 0.0
    filler.fill([(one, ()) for one in matchers])
    later = [grammar.matcher(SteppingClock(2.0)) for _ in range(2)]
    filler.fill([(one, ()) for one in later])
    assert not any(one.failed for one in later)


def test_a_busy_machine_does_not_end_an_answer() -> None:
    filler, grammar = MaskFiller(SteppingClock(2.0)), compiled("regex", "a*")
    matchers = [grammar.matcher(SteppingClock(0.0)) for _ in range(2)]
    for _ in range(10):
        filler.fill([(one, ()) for one in matchers])
    assert not any(one.failed for one in matchers)


# Each letter behind the first c makes new states of the automaton.
HUNGRY = "a(b|c.*a.{14}|c.*b.{13}c.*|c.*d.{15})"


@pytest.mark.parametrize("num_answers", [1, 2], ids=["on this thread", "on several threads"])
def test_a_limit_in_the_path_of_guesses_does_not_end_the_answer(num_answers: int) -> None:
    grammar = compiled("regex", HUNGRY, limits=GrammarLimits(max_guess_states=80))
    matchers = [grammar.matcher() for _ in range(num_answers)]
    assert all(one.consume(ord("a")) for one in matchers)
    drafts = list(b"cabcabdacabdacbdd")
    MaskFiller().fill([(one, drafts) for one in matchers])
    for one in matchers:
        assert [allowed(mask) for mask in one.masks] == [{*b"bc"}]
        assert not one.failed
        assert (one.allowed_start([*b"b"]), one.forced()) == (0, []), "it makes no more guesses"
        assert one.consume(ord("b"))
        assert one.complete
    assert grammar.worn


def test_guesses_have_a_time_of_their_own() -> None:
    clock = SteppingClock(0.0)
    matcher = compiled("regex", "abcd[ef]").matcher(clock)
    clock.step_s = 0.6
    assert matcher.forced() == [*b"abcd"]
    assert matcher.forced() == [*b"abcd"]
    assert matcher.forced() == [], "2 guesses of 0.6 s take the first second"
    clock.step_s = 0.0
    MaskFiller().fill([(matcher, [*b"ab"])])
    assert len(matcher.masks) == 1
    assert matcher.consume(ord("a"))
