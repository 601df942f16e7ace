"""Read questions with one right answer each from a file of JSON lines."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from convoy.errors import InputError

_REMEDY = "give a file with one JSON object on each line, as docs/verify.md describes"

BUNDLED_QUESTIONS = Path(__file__).resolve().parent.parent / "models" / "questions.jsonl"

_KEYS = ("kind", "question", "answer")
_MAX_FILE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Question:
    """Hold one line of a questions file."""

    kind: str
    text: str
    answer: str


def load_questions(path: Path) -> tuple[Question, ...]:
    """Read a JSONL file of ``{"kind", "question", "answer"}``. Blank lines are skipped.

    Raises InputError, naming the file and the wrong line.
    """
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise InputError(f"{path} has {path.stat().st_size} bytes, expected at most {_MAX_FILE_BYTES}")
        lines = path.read_text("utf-8").split("\n")
    except OSError as error:
        raise InputError(f"cannot read questions from {path}: {error.strerror}", hint=_REMEDY) from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 at byte {error.start}, expected lines of JSON", hint=_REMEDY
        ) from error
    questions = tuple(
        _read_line(line, f"{path} line {number}") for number, line in enumerate(lines, 1) if line.strip()
    )
    if not questions:
        raise InputError(f"{path} holds no questions, expected at least one", hint=_REMEDY)
    return questions


def _read_line(line: str, place: str) -> Question:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place} is not JSON", hint=_REMEDY) from error
    if not isinstance(value, dict):
        raise InputError(f"{place} is not an object with {', '.join(_KEYS)}", hint=_REMEDY)
    for key in _KEYS:
        if not isinstance(value.get(key), str) or not value[key].strip():
            raise InputError(f"{place} has no text under {key!r}", hint=_REMEDY)
    return Question(value["kind"], value["question"], value["answer"])


def take(questions: Sequence[Question], limit: int | None) -> tuple[Question, ...]:
    """Take the first ``limit`` questions with kinds interleaved, so that a short run asks every kind."""
    kinds: dict[str, list[Question]] = {}
    for question in questions:
        kinds.setdefault(question.kind, []).append(question)
    interleaved = itertools.chain.from_iterable(itertools.zip_longest(*kinds.values()))
    return tuple(itertools.islice((question for question in interleaved if question is not None), limit))
