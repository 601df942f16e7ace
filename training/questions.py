"""Generate questions with one right answer, in eight kinds, and hold some of them out of training by a rule.

A question is *reserved* when the SHA-256 of its normalised text falls in one bucket of sixteen. The operands
of some kinds span a large space (sums, differences, comparisons, sorting). For these kinds the operands
themselves are hashed as well, in any wording: `Question.subject`. Training uses a question only if neither is
reserved; the shipped `questions.jsonl` holds questions with both reserved. So no held-out question is in the
training text, and no held-out sum of numbers from 200 upward is there in another wording either.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

import words
from facts import recall_parts

NUM_BUCKETS = 16
RESERVED_BUCKET = 7
SMALL_NUMBER = 200
"""Operands below this are taught in some wording even if one wording is held out."""

NUMBER_HINTS = (
    "",
    "",
    " Answer with just the number.",
    " Just the number, please.",
    " Give only the number.",
)
WORD_HINTS = ("", "", " Answer with one word.", " Just the word, please.")
SPELLING_HINTS = ("", "", " Answer with one word.", " Give only the answer.")
HINT_ENDS = tuple({hint for hint in (*NUMBER_HINTS, *WORD_HINTS, *SPELLING_HINTS) if hint})


@dataclass(frozen=True)
class Question:
    """Hold one question: `kind` (a key of `KINDS`), the text, the only right answer, the operands' name."""

    kind: str
    text: str
    answer: str
    subject: str = ""


def normalise(text: str) -> str:
    """Lower the case, make each run of white space one space, and strip the ends, for the hold-out rule's
    hash.
    """
    return re.sub(r"\s+", " ", text).strip().lower()


def fingerprint(text: str) -> str:
    """Return the SHA-256 of the normalised text, in hex."""
    return hashlib.sha256(normalise(text).encode()).hexdigest()


def is_reserved(text: str) -> bool:
    """Return whether this text is held out and must never stand in the training text."""
    return int(fingerprint(text)[:8], 16) % NUM_BUCKETS == RESERVED_BUCKET


def may_train(question: Question) -> bool:
    """Return whether neither the text nor the operands are reserved."""
    return not is_reserved(question.text) and not (question.subject and is_reserved(question.subject))


def may_hold_out(question: Question) -> bool:
    """Return whether text and operands are reserved, and no longer question can hold the text whole.

    Training may ask a reserved text's words with a hint after them, or with one more fact before them. So a
    question without hashed operands is held out with its hint, and a recall only if it states three sentences
    or more.
    """
    if question.kind == "recall" and question.text.count(". ") < 3:
        return False
    whole = bool(question.subject) or question.text.endswith(HINT_ENDS)
    return whole and is_reserved(question.text) and (not question.subject or is_reserved(question.subject))


def _number(rng: random.Random) -> int:
    return rng.randrange((10, 100, 1000)[rng.choices((0, 1, 2), (15, 35, 50))[0]])


def _pair_subject(kind: str, first: int, second: int) -> str:
    if max(first, second) < SMALL_NUMBER:
        return ""
    return f"{kind} {min(first, second)} {max(first, second)}"


def addition(rng: random.Random) -> Question:
    """Ask for a sum of two numbers below 1,000."""
    a, b = _number(rng), _number(rng)
    thing = rng.choice(words.FOODS + words.THINGS)
    name = rng.choice(words.NAMES)
    text = rng.choice(
        (
            f"What is {a}+{b}?",
            f"What is {a}+{b}?",
            f"What is {a} + {b}?",
            f"What is {a} plus {b}?",
            f"Add {a} and {b}.",
            f"{a}+{b}=",
            f"{a} + {b} = ?",
            f"What is the sum of {a} and {b}?",
            f"How much is {a} plus {b}?",
            f"Calculate {a} + {b}.",
            f"{name} has {a} of one {thing} and gets {b} more. How many are there now?",
        )
    )
    return Question("addition", text + rng.choice(NUMBER_HINTS), str(a + b), _pair_subject("addition", a, b))


def subtraction(rng: random.Random) -> Question:
    """Ask for a difference that is not negative, of numbers below 1,000."""
    b, a = sorted((_number(rng), _number(rng)))
    name = rng.choice(words.NAMES)
    text = rng.choice(
        (
            f"What is {a}-{b}?",
            f"What is {a} - {b}?",
            f"What is {a} minus {b}?",
            f"Subtract {b} from {a}.",
            f"{a}-{b}=",
            f"{a} - {b} = ?",
            f"How much is {a} minus {b}?",
            f"Take {b} away from {a}.",
            f"What is the difference between {a} and {b}?",
            f"{name} has {a} coins and gives away {b}. How many are left?",
        )
    )
    return Question(
        "subtraction", text + rng.choice(NUMBER_HINTS), str(a - b), _pair_subject("subtraction", a, b)
    )


def comparison(rng: random.Random) -> Question:
    """Ask which of two or three different numbers is the larger or smaller, or whether one is."""
    values = rng.sample(range(1000), 3) if rng.random() < 0.6 else rng.sample(range(100), 3)
    if rng.random() < 0.3:
        near = values[0] + rng.choice((-10, -2, -1, 1, 2, 10, 100))
        values[1] = near if 0 <= near != values[0] and near != values[2] else values[1]
    a, b, c = values
    large = rng.random() < 0.5
    pick = max if large else min
    form = rng.randrange(4)
    if form == 3:
        word = rng.choice(("larger", "greater", "bigger") if large else ("smaller", "less"))
        hint = rng.choice(("", " Answer yes or no."))
        answer = "yes" if (a > b) == large else "no"
        return Question(
            "comparison", f"Is {a} {word} than {b}?{hint}", answer, _pair_subject("comparison", a, b)
        )
    hint = rng.choice(NUMBER_HINTS)
    if form == 2:
        word = rng.choice(("largest", "greatest", "biggest") if large else ("smallest", "lowest"))
        text = f"Which number is the {word}: {a}, {b} or {c}?"
        return Question("comparison", text + hint, str(pick(values)), f"comparison {sorted(values)}")
    word = rng.choice(("larger", "greater", "bigger") if large else ("smaller", "lower"))
    text = rng.choice(
        (
            f"Which is {word}, {a} or {b}?",
            f"Which number is {word}: {a} or {b}?",
            f"{a} or {b}: which one is {word}?",
            f"Of {a} and {b}, which is the {word} number?",
        )
    )
    return Question("comparison", text + hint, str(pick(a, b)), _pair_subject("comparison", a, b))


def sorting(rng: random.Random) -> Question:
    """Ask for two to five different words in alphabetical order."""
    chosen = rng.sample(words.NOUNS, rng.choices((2, 3, 4, 5), (1, 4, 3, 2))[0])
    listed = ", ".join(chosen)
    text = rng.choice(
        (
            f"Sort these words alphabetically: {listed}.",
            f"Sort these words in alphabetical order: {listed}.",
            f"Put these words in alphabetical order: {listed}.",
            f"Sort the words: {listed}.",
            f"Sort alphabetically: {listed}",
            f"Arrange from A to Z: {listed}.",
        )
    )
    hint = rng.choice(("", "", " Separate them with commas.", " Answer with just the list."))
    return Question("sorting", text + hint, ", ".join(sorted(chosen)), f"sorting {sorted(chosen)}")


def invented_word(rng: random.Random) -> str:
    """Return a pronounceable word of two or three syllables, so that spelling is learnt, not looked up."""
    syllables = (
        rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") + rng.choice("lmnrst  ").strip() for _ in "abc"
    )
    return "".join(list(syllables)[: rng.choice((2, 2, 3))])


def spelling(rng: random.Random, *, invented: bool = False) -> Question:
    """Ask for a word backwards."""
    word = invented_word(rng) if invented else rng.choice(words.SPELLABLE)
    text = rng.choice(
        (
            f"Spell {word} backwards.",
            f'Spell "{word}" backwards.',
            f"Spell the word {word} backwards.",
            f'Spell the word "{word}" backwards.',
            f"Write {word} backwards.",
            f'Write "{word}" backwards.',
            f"Reverse the letters of {word}.",
            f'Reverse the letters of "{word}".',
            f"What is {word} spelled backwards?",
            f'What is "{word}" spelled backwards?',
            f"How do you write {word} backwards?",
        )
    )
    hint = rng.choice(SPELLING_HINTS)
    return Question("spelling", text + hint, word[::-1])


def counting(rng: random.Random) -> Question:
    """Ask how many words a list has, how often one word stands in it, or how many letters a word has."""
    form = rng.randrange(3)
    hint = rng.choice(NUMBER_HINTS)
    if form == 0:
        chosen = rng.sample(words.NOUNS, rng.randint(1, 10))
        listed = ", ".join(chosen)
        text = rng.choice(
            (
                f"How many words are in this list: {listed}?",
                f"Count the words: {listed}.",
                f"How many words are there: {listed}?",
                f"Count the items in this list: {listed}.",
            )
        )
        return Question("counting", text + hint, str(len(chosen)))
    if form == 1:
        some = rng.sample(words.NOUNS, rng.randint(2, 3))
        listed_words = [rng.choice(some) for _ in range(rng.randint(2, 10))]
        asked = some[0]
        text = rng.choice(
            (
                f'How many times does "{asked}" appear here: {" ".join(listed_words)}?',
                f"How many times does {asked} appear in this list: {', '.join(listed_words)}?",
                f'Count the word "{asked}": {" ".join(listed_words)}.',
            )
        )
        return Question("counting", text + hint, str(listed_words.count(asked)))
    word = rng.choice(words.SPELLABLE)
    text = rng.choice(
        (
            f"How many letters are in the word {word}?",
            f'How many letters are in "{word}"?',
            f"How many letters does {word} have?",
            f'Count the letters in "{word}".',
            f"Count the letters of the word {word}.",
        )
    )
    return Question("counting", text + hint, str(len(word)))


def recall(rng: random.Random) -> Question:
    """Ask for a fact stated earlier in the same prompt."""
    statements, text, answer, numeric = recall_parts(rng)
    hint = rng.choice(NUMBER_HINTS if numeric else WORD_HINTS)
    return Question("recall", f"{' '.join(statements)} {text}{hint}", answer)


CONVERSIONS = (
    ("metres", "centimetres", 100, 99),
    ("kilometres", "metres", 1000, 99),
    ("centimetres", "millimetres", 10, 99),
    ("kilograms", "grams", 1000, 99),
    ("litres", "millilitres", 1000, 99),
    ("euros", "cents", 100, 99),
    ("hours", "minutes", 60, 24),
    ("minutes", "seconds", 60, 24),
    ("days", "hours", 24, 14),
    ("weeks", "days", 7, 20),
    ("years", "months", 12, 20),
    ("dozens", "items", 12, 20),
)
"""(large unit, small unit, small in one large, largest amount of the large unit that is asked)."""


def conversion(rng: random.Random) -> Question:
    """Ask for an amount of one unit in another, both ways, always a whole number."""
    large, small, factor, limit = rng.choice(CONVERSIONS)
    amount = rng.randint(2, limit)
    if rng.random() < 0.6:
        given, source, wanted, target = amount, large, amount * factor, small
    else:
        given, source, wanted, target = amount * factor, small, amount, large
    text = rng.choice(
        (
            f"How many {target} are {given} {source}?",
            f"How many {target} are in {given} {source}?",
            f"Convert {given} {source} to {target}.",
            f"Convert {given} {source} into {target}.",
            f"What is {given} {source} in {target}?",
            f"{given} {source} is how many {target}?",
        )
    )
    return Question("conversion", text + rng.choice(NUMBER_HINTS), str(wanted))


KINDS: dict[str, Callable[[random.Random], Question]] = {
    "addition": addition,
    "subtraction": subtraction,
    "comparison": comparison,
    "sorting": sorting,
    "spelling": spelling,
    "counting": counting,
    "recall": recall,
    "conversion": conversion,
}

HASHED_BY_OPERANDS = (addition, subtraction, comparison)

TRAINING_WEIGHTS = {
    "addition": 17,
    "subtraction": 14,
    "comparison": 8,
    "sorting": 12,
    "spelling": 10,
    "counting": 16,
    "recall": 16,
    "conversion": 7,
}


def training_question(rng: random.Random) -> Question:
    """Generate a question that may stand in the training text.

    Kinds come in the shares of `TRAINING_WEIGHTS`.
    """
    kind = rng.choices(tuple(TRAINING_WEIGHTS), tuple(TRAINING_WEIGHTS.values()))[0]
    while True:
        if kind == "spelling" and rng.random() < 0.3:
            question = spelling(rng, invented=True)
        else:
            question = KINDS[kind](rng)
        if may_train(question):
            return question


def held_out_questions(seed: int, num_per_kind: int) -> list[Question]:
    """Generate `num_per_kind` different held-out questions of each kind, in the order of `KINDS`."""
    rng = random.Random(seed)
    questions: list[Question] = []
    for make in KINDS.values():
        chosen: dict[str, Question] = {}
        while len(chosen) < num_per_kind:
            question = make(rng)
            if make in HASHED_BY_OPERANDS and not question.subject and rng.randrange(NUM_BUCKETS):
                # Small operands pass one hash, large ones two. Thin the small ones to their natural share.
                continue
            if may_hold_out(question):
                chosen.setdefault(normalise(question.text), question)
        questions.extend(chosen.values())
    return questions
