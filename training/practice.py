"""Generate extra practice for a second stretch of training, in the kinds that the first one left weakest.

The ordinary stream is not touched, so a tokeniser or a first stretch made from it stays reproducible.
"""

from __future__ import annotations

import random
import re

from conversations import SYSTEM_MESSAGES, Document
from questions import KINDS, Question, may_train

PRACTICE_SHARE = 0.4
BACKWARD = re.compile(r"\b(Who|Which box)\b(?! am I)")
REPEATS = re.compile(r"How many times|Count the word \"")
HARD = {"recall": BACKWARD, "counting": REPEATS}
"""The form of most practice of a kind: finding the owner of a thing; counting one word among others."""


def practice_question(rng: random.Random, kind: str) -> Question:
    """Generate a trainable question of the kind, three in four of the harder sort if the kind has one."""
    wanted = HARD.get(kind) if rng.random() < 0.75 else None
    while True:
        question = KINDS[kind](rng)
        if may_train(question) and (wanted is None or wanted.search(question.text)):
            return question


def practice_document(rng: random.Random, kinds: tuple[str, ...]) -> Document:
    """Generate one to three questions of the kinds, with a system message now and then."""
    doc = Document()
    if rng.random() < 0.15:
        doc.turns.append(("system", rng.choice(SYSTEM_MESSAGES)))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        question = practice_question(rng, rng.choice(kinds))
        doc.exchange(question.text, question.answer)
    return doc
