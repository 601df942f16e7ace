from __future__ import annotations

import random

import words
from conversations import conversation, leading_spaces
from facts import FAMILIES
from stories import PLOTS, story


def test_no_word_stands_twice_in_a_list() -> None:
    for name, listed in vars(words).items():
        if name.isupper():
            assert len(set(listed)) == len(listed), name


def test_a_story_names_its_subject_and_uses_the_right_article() -> None:
    rng = random.Random(1)
    for subject in words.ANIMALS:
        told = story(rng, subject)
        assert f" {subject} " in told
        assert not any(f" a {vowel}" in told for vowel in "aeiou")
        assert told.endswith((".", "!", '"'))


def test_a_longer_story_has_more_plots() -> None:
    short = story(random.Random(2), "fox", num_plots=1)
    long = story(random.Random(2), "fox", num_plots=len(PLOTS))
    assert len(long) > 3 * len(short)


def test_facts_of_one_family_never_answer_one_question_twice() -> None:
    rng = random.Random(3)
    for family in FAMILIES:
        for _ in range(50):
            asked = [text for _, pairs in family(rng, 3) for text, _ in pairs]
            own_pet = [text for text in asked if text == "What is my pet called?"]
            assert len(set(asked)) == len(asked)
            assert len(own_pet) <= 1


def test_turns_alternate_after_an_optional_system_message() -> None:
    rng = random.Random(4)
    for index in range(300):
        roles = [role for role, _ in conversation(rng, long=index % 10 == 0).turns]
        spoken = roles[1:] if roles[:1] == ["system"] else roles
        assert spoken == ["user", "assistant"] * (len(spoken) // 2)


def test_ten_kibibytes_of_spaces_are_practised() -> None:
    rng = random.Random(5)
    lengths = [len(leading_spaces(rng)) for _ in range(2_000)]
    assert lengths.count(10_240) > 50
    assert min(lengths) < 10
    assert max(lengths) <= 60_000
