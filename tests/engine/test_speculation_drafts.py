"""Guesses from what a sequence said before: which, how many, and what they cost."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.cluster.options import HeadOptions
from convoy.config.table import MAX_DRAFT
from convoy.engine.sequence import Sequence
from convoy.engine.speculation import LookupDrafter, PlaceIndex
from convoy.errors import ConfigError
from convoy.plan.spec.model import ModelSpec


def said(*tokens: int) -> Sequence:
    return Sequence(tokens, max_tokens=1000)


def guess(drafter: LookupDrafter, sequence: Sequence, num_right: int | None = None) -> int:
    """Make one guess, tell its outcome (None: all right), and return how many tokens it had."""
    drafts = drafter.propose(sequence, 100)
    if drafts:
        drafter.learn(sequence, len(drafts), len(drafts) if num_right is None else num_right)
    return len(drafts)


def test_what_followed_the_last_time_is_guessed_again() -> None:
    assert LookupDrafter(3).propose(said(1, 2, 3, 4, 5, 1, 2), 8) == [3, 4, 5]


def test_the_place_with_most_tokens_in_common_counts_before_the_latest() -> None:
    assert LookupDrafter(1).propose(said(9, 1, 2, 7, 8, 1, 2, 5, 9, 1, 2), 8) == [7]
    assert LookupDrafter(1).propose(said(8, 1, 2, 7, 8, 1, 2, 5, 8, 1, 2), 8) == [5], (
        "of two alike the latest"
    )


def test_a_guess_goes_on_past_the_end_as_the_repetition_does() -> None:
    assert LookupDrafter(4).propose(said(5, 1, 2, 1, 2), 8) == [1, 2, 1, 2]
    assert LookupDrafter(4).propose(said(5, 3, 3, 3), 8) == [3, 3, 3, 3]


@pytest.mark.parametrize("tokens", [(1,), (1, 2), (1, 1), (1, 2, 3, 4), (1, 2, 3, 1)])
def test_who_has_not_repeated_two_tokens_gets_no_guess(tokens: tuple[int, ...]) -> None:
    assert LookupDrafter(4).propose(said(*tokens), 8) == []


def test_no_more_is_guessed_than_was_asked_for() -> None:
    for most in range(1, 6):
        assert len(LookupDrafter(16).propose(said(*[1, 2] * 20), most)) == min(most, 4)


def test_guesses_get_longer_while_they_are_right() -> None:
    drafter, sequence = LookupDrafter(16), said(*[1, 2] * 20)
    assert [guess(drafter, sequence) for _ in range(4)] == [4, 8, 16, 16]


def test_a_guess_that_was_right_in_part_sets_the_length_of_the_next() -> None:
    drafter, sequence = LookupDrafter(16), said(*[1, 2] * 20)
    assert [guess(drafter, sequence, right) for right in (2, 1, 1)] == [4, 3, 2]


def test_after_wrong_guesses_there_are_pauses_that_get_longer_and_then_another_try() -> None:
    drafter, sequence = LookupDrafter(16), said(1, 2, 9, 8, 1, 2)
    lengths = [guess(drafter, sequence, 0) for _ in range(400)]
    tries = [index for index, length in enumerate(lengths) if length]
    assert lengths[:3] == [4, 2, 1]
    assert all(lengths[index] == 1 for index in tries[2:])
    pauses = [after - before - 1 for before, after in itertools.pairwise(tries)]
    assert pauses[2:] == [4, 8, 16, 32, *[64] * 5]
    assert guess(drafter, sequence, 0) == 0


def test_a_right_guess_ends_the_long_pauses() -> None:
    drafter, sequence = LookupDrafter(16), said(1, 2, 9, 8, 1, 2)
    for _ in range(60):
        guess(drafter, sequence, 0)
    while not guess(drafter, sequence):
        pass
    assert [guess(drafter, sequence, 0) for _ in range(8)] == [2, 1, 0, 0, 0, 0, 1, 0]


def test_a_long_repetition_is_guessed_at_in_a_pause_too() -> None:
    drafter, sequence = LookupDrafter(16), said(*range(20), 5, 6)
    while guess(drafter, sequence, 0):
        pass
    sequence.tokens += range(7, 12)
    assert drafter.propose(sequence, 8) == [], "7 tokens in common may be chance"
    sequence.tokens.append(12)
    assert drafter.propose(sequence, 8) == [13]


def test_sequences_learn_by_themselves_and_who_is_over_is_forgotten() -> None:
    drafter, one, other = LookupDrafter(16), said(*[1, 2] * 20), said(*[1, 2] * 20)
    assert [guess(drafter, one) for _ in range(2)] == [4, 8]
    assert guess(drafter, other) == 4
    drafter.forget(one)
    drafter.forget(one)
    drafter.learn(one, 4, 4)
    assert guess(drafter, one) == 4


def test_a_sequence_that_was_cut_back_is_guessed_at_from_what_is_left() -> None:
    drafter, sequence = LookupDrafter(4), said(1, 2, 3, 4, 1, 2, 7, 8, 9)
    assert drafter.propose(sequence, 4) == []
    sequence.tokens[4:] = [5, 6, 1, 2]
    assert drafter.propose(sequence, 4) == [3, 4, 5, 6]
    sequence.tokens[2:] = []
    assert drafter.propose(sequence, 4) == []


class _Counted(list[int]):
    """Count how often one of these tokens is read."""

    num_reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_reads += 1
        return super().__getitem__(index)


def test_a_guess_costs_the_same_however_long_the_sequence_is() -> None:
    reads = []
    for length in (500, 8000):
        random = Random(1)
        tokens = _Counted(random.randrange(6) for _ in range(length))
        index = PlaceIndex()
        index.find(tokens)
        tokens.num_reads = 0
        for _ in range(20):
            tokens.append(random.randrange(6))
            index.find(tokens)
        reads.append(tokens.num_reads / 20)
    assert max(reads) < 100, "a bounded number of places, each compared to a bounded length"


@given(st.lists(st.integers(0, 4), max_size=80), st.integers(1, 8))
def test_a_guess_is_what_a_search_through_everything_finds(tokens: list[int], most: int) -> None:
    drafts = LookupDrafter(8).propose(said(*tokens), most)
    repeated = [p for p in range(2, len(tokens)) if tokens[p - 2 : p] == tokens[-2:]]
    assert len(drafts) == (min(4, most) if repeated else 0)
    if drafts:
        firsts = {tokens[p] for p in repeated}
        assert drafts[0] in firsts
        following = tokens + drafts
        assert any(all(following[p + i] == draft for i, draft in enumerate(drafts)) for p in repeated), (
            "all of it followed one place"
        )


SPEC = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "vocab_size": 16,
    "max_position_embeddings": 64,
}


def test_nobody_guesses_where_state_cannot_be_rewound_or_nobody_asked() -> None:
    spec = ModelSpec.from_config(SPEC, "tiny")
    assert HeadOptions(speculate=8).drafter(spec, steady=True) is not None
    assert HeadOptions(speculate=8).drafter(replace(spec, can_rewind=False), steady=True) is None
    assert HeadOptions(speculate=0, jump_forward=False).drafter(spec, steady=True) is None


def test_under_a_kernel_that_is_not_exact_nobody_guesses_unless_asked_for_it() -> None:
    spec = ModelSpec.from_config(SPEC, "tiny")
    assert HeadOptions(speculate=8).drafter(spec, steady=False) is None
    asked = HeadOptions(speculate=8, guess_inexact=True)
    assert asked.drafter(spec, steady=False) is not None
    assert replace(asked, speculate=0, jump_forward=False).drafter(spec, steady=False) is None


def test_forced_tokens_are_guessed_without_speculation_wherever_a_guess_can_be_undone() -> None:
    spec = ModelSpec.from_config(SPEC, "tiny")
    assert HeadOptions(speculate=0).drafter(spec, steady=True) is not None
    assert HeadOptions(speculate=0).drafter(replace(spec, can_rewind=False), steady=True) is None
    assert HeadOptions(speculate=0).drafter(spec, steady=False) is None


@pytest.mark.parametrize("length", [-1, MAX_DRAFT + 1])
def test_a_length_out_of_range_is_refused(length: int) -> None:
    with pytest.raises(ConfigError, match=f"speculate is {length}, expected 0 to {MAX_DRAFT} tokens"):
        HeadOptions(speculate=length).check()
