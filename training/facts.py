"""Generate facts to state and ask back: the recall kind, in one message or over several turns."""

from __future__ import annotations

import random
from collections.abc import Callable

import words

Fact = tuple[str, tuple[tuple[str, str], ...]]
"""A statement and the (question, answer) pairs it settles."""

FILLERS = (
    "The weather was mild.",
    "It was a long day.",
    "The train was late again.",
    "Everyone had lunch together.",
    "The old clock struck four.",
    "Nobody said a word.",
    "The windows were open.",
    "There was music in the street.",
)


def _boxes(rng: random.Random, num: int) -> list[Fact]:
    colours, things = rng.sample(words.COLOURS, num), rng.sample(words.NOUNS, num)
    verb = rng.choice(("holds", "contains"))
    stem = "hold" if verb == "holds" else "contain"
    return [
        (
            f"The {c} box {verb} the {t}.",
            ((f"What does the {c} box {stem}?", t), (f"Which box {verb} the {t}?", c)),
        )
        for c, t in zip(colours, things, strict=True)
    ]


def _likes(rng: random.Random, num: int) -> list[Fact]:
    people, foods = rng.sample(words.NAMES, num), rng.sample(words.FOODS, num)
    return [
        (f"{p} likes {f}.", ((f"What does {p} like?", f), (f"Who likes {f}?", p)))
        for p, f in zip(people, foods, strict=True)
    ]


def _pets(rng: random.Random, num: int) -> list[Fact]:
    people, pets = rng.sample(words.NAMES, num), rng.sample(words.PET_NAMES, num)
    animals = rng.sample(words.ANIMALS, num)
    return [
        (
            f"{p} has {words.article(a)} {a} called {n}.",
            ((f"What is {p}'s {a} called?", n), (f"Who has {words.article(a)} {a}?", p)),
        )
        for p, a, n in zip(people, animals, pets, strict=True)
    ]


def _ages(rng: random.Random, num: int) -> list[Fact]:
    people, ages = rng.sample(words.NAMES, num), rng.sample(range(3, 99), num)
    return [
        (f"{p} is {n} years old.", ((f"How old is {p}?", str(n)),)) for p, n in zip(people, ages, strict=True)
    ]


def _homes(rng: random.Random, num: int) -> list[Fact]:
    people, towns = rng.sample(words.NAMES, num), rng.sample(words.TOWNS, num)
    return [
        (f"{p} lives in {t}.", ((f"Where does {p} live?", t), (f"Who lives in {t}?", p)))
        for p, t in zip(people, towns, strict=True)
    ]


def _days(rng: random.Random, num: int) -> list[Fact]:
    events, days = rng.sample(words.EVENTS, num), rng.sample(words.DAYS, num)
    return [
        (f"The {e} is on {d}.", ((f"When is the {e}?", d), (f"On which day is the {e}?", d)))
        for e, d in zip(events, days, strict=True)
    ]


def _mine(rng: random.Random, num: int) -> list[Fact]:
    name, colour, town = rng.choice(words.NAMES), rng.choice(words.COLOURS), rng.choice(words.TOWNS)
    code, animal, pet = str(rng.randint(100, 9999)), rng.choice(words.ANIMALS), rng.choice(words.PET_NAMES)
    food = rng.choice(words.FOODS)
    every: list[Fact] = [
        (f"My name is {name}.", (("What is my name?", name), ("Who am I?", name))),
        (f"My favourite colour is {colour}.", (("What is my favourite colour?", colour),)),
        (f"I live in {town}.", (("Where do I live?", town), ("Which town do I live in?", town))),
        (f"My code is {code}.", (("What is my code?", code), ("Which code is mine?", code))),
        (
            f"My {animal} is called {pet}.",
            ((f"What is my {animal} called?", pet), ("What is my pet called?", pet)),
        ),
        (f"My favourite food is {food}.", (("What is my favourite food?", food),)),
    ]
    return rng.sample(every, num)


FAMILIES: tuple[Callable[[random.Random, int], list[Fact]], ...] = (
    _boxes,
    _likes,
    _pets,
    _ages,
    _homes,
    _days,
    _mine,
    _mine,
)


def some_facts(rng: random.Random) -> list[Fact]:
    """Generate one to four facts of one family, no two about the same thing."""
    return rng.choice(FAMILIES)(rng, rng.choices((1, 2, 3, 4), (3, 4, 3, 2))[0])


def recall_parts(rng: random.Random) -> tuple[list[str], str, str, bool]:
    """Return the sentences to state, a question about one, its answer, and whether that is a number."""
    facts = some_facts(rng)
    text, answer = rng.choice(rng.choice(facts)[1])
    statements = [statement for statement, _ in facts]
    if rng.random() < 0.25:
        statements.insert(rng.randrange(len(statements) + 1), rng.choice(FILLERS))
    return statements, text, answer, answer.isdigit()
