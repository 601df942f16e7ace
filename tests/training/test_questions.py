from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from conversations import document
from practice import practice_document
from questions import KINDS, Question, fingerprint, is_reserved, normalise, spelling, training_question
from training.answers import CHECKERS

NUM_DOCUMENTS = 12_000


@pytest.fixture(scope="module")
def sample() -> tuple[list[str], str]:
    """Return (every user's turn, the whole text in normal form) of a large sample of the training text."""
    rng = random.Random(20_261_121)
    documents = [document(rng, long=index % 12 == 0) for index in range(NUM_DOCUMENTS)]
    documents += [practice_document(rng, ("recall", "counting")) for _ in range(4_000)]
    asked = [text for doc in documents for text in doc.questions]
    return asked, normalise("\n".join(text for doc in documents for _, text in doc.turns))


def test_there_are_four_hundred_different_questions_fifty_of_each_kind(shipped: list[dict[str, Any]]) -> None:
    assert all(set(item) == {"kind", "question", "answer"} for item in shipped)
    assert all(isinstance(value, str) and value for item in shipped for value in item.values())
    assert len({normalise(item["question"]) for item in shipped}) == len(shipped) == 400
    assert Counter(item["kind"] for item in shipped) == dict.fromkeys(KINDS, 50)


def test_every_held_out_answer_is_right_by_an_independent_reckoning(shipped: list[dict[str, Any]]) -> None:
    wrong = [item for item in shipped if CHECKERS[item["kind"]](item["question"]) != item["answer"]]
    assert not wrong


def test_generated_answers_are_right_by_an_independent_reckoning() -> None:
    rng = random.Random(3)
    for _ in range(4_000):
        question = training_question(rng)
        assert CHECKERS[question.kind](question.text) == question.answer, question


def test_an_invented_word_is_asked_backwards_rightly() -> None:
    question = spelling(random.Random(4), invented=True)
    assert question.answer[::-1] in question.text


def test_every_held_out_question_is_in_the_reserved_bucket(shipped: list[dict[str, Any]]) -> None:
    assert all(is_reserved(item["question"]) for item in shipped)


@pytest.mark.long
def test_no_question_of_a_large_training_sample_is_in_the_reserved_bucket(
    sample: tuple[list[str], str],
) -> None:
    asked, _ = sample
    assert len(asked) > 20_000
    questions = [text for text in asked if text.rstrip().endswith(("?", "=", "number.", "word.", "please."))]
    assert len(questions) > 10_000
    small_talk_and_stories = (
        "Who are",
        "What are you",
        "What is your name",
        "Who made",
        "What can",
        "How can",
        "How are",
    )
    told = ("Can you tell me", "What do you know")
    reserved = [t for t in questions if is_reserved(t) and not t.startswith((*small_talk_and_stories, *told))]
    assert not reserved


@pytest.mark.long
def test_no_held_out_question_stands_in_the_training_text(
    shipped: list[dict[str, Any]], sample: tuple[list[str], str]
) -> None:
    asked, text = sample
    hashes = {fingerprint(question) for question in asked}
    assert not [item for item in shipped if fingerprint(item["question"]) in hashes]
    assert not [item for item in shipped if f" {normalise(item['question'])} " in text]


def test_operands_held_out_in_one_wording_are_held_out_in_all() -> None:
    rng = random.Random(5)
    pairs = Counter[bool]()
    for _ in range(8_000):
        question = training_question(rng)
        if question.subject:
            pairs[is_reserved(question.subject)] += 1
    assert pairs[False] > 1_000
    assert not pairs[True]


def test_white_space_and_case_do_not_change_a_fingerprint() -> None:
    assert fingerprint("  What is\n 1+2? ") == fingerprint("what is 1+2?") != fingerprint("what is 1+3?")


def test_about_one_text_in_sixteen_is_reserved() -> None:
    reserved = sum(is_reserved(f"What is {a}+{b}?") for a in range(100) for b in range(100))
    assert 500 < reserved < 750


def test_the_same_seed_gives_the_same_question() -> None:
    first, second = (training_question(random.Random(9)) for _ in range(2))
    assert isinstance(first, Question)
    assert first == second
