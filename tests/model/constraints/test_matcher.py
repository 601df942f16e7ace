"""A matcher tells the tokens that may come next, and moves only when it is told to."""

from __future__ import annotations

import numpy as np

from convoy.model.constraints.compiler import GrammarLimits
from convoy.model.constraints.matcher import MaskFiller, Matcher, mask_bytes
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
    matcher = compiled("lark", 'start: e\ne: e e | e e e | "a"').matcher()
    assert not all(matcher.consume(ord("a")) for _ in range(5000))


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


def test_the_time_of_masks_counts_against_the_answer() -> None:
    filler, matcher = MaskFiller(SteppingClock(0.3)), compiled("regex", "a*").matcher()
    num_tokens = 0
    while not matcher.failed and num_tokens < 100:
        filler.fill([(matcher, ())])
        assert matcher.consume(ord("a")) == (not matcher.failed)
        num_tokens += 1
    assert num_tokens == 4, "4 masks of 0.3 s take the first second"


def test_a_slow_step_charges_each_answer_its_own_time_from_the_next_step_on() -> None:
    clock = SteppingClock(0.0)
    filler, grammar = MaskFiller(clock), compiled("regex", "a*")
    matchers = [grammar.matcher(), grammar.matcher()]
    clock.step_s = 2.0
    filler.fill([(one, ()) for one in matchers])
    assert not any(one.failed for one in matchers), "the first slow step cannot be divided"
    filler.fill([(one, ()) for one in matchers])
    assert all(one.failed for one in matchers)
    clock.step_s = 0.0
    later = [grammar.matcher(), grammar.matcher()]
    filler.fill([(one, ()) for one in later])
    filler.fill([(one, ()) for one in later])
    assert not any(one.failed for one in later)
