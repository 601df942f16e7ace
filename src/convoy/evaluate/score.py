"""Score a model's answers: whether each is right, and how many are, by kind and in all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from convoy.evaluate.questions import Question


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """Hold a model's answer, its tokens and its duration."""

    text: str
    num_tokens: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """Hold a question with the model's answer."""

    question: Question
    answer: ScoredAnswer
    right: bool


def is_right(answer: str, expected: str) -> bool:
    """Return whether an answer equals the expected one, apart from outer white space."""
    return answer.strip() == expected.strip()


def ask_all(
    questions: Iterable[Question],
    ask: Callable[[Question], ScoredAnswer],
    each: Callable[[Callable[[Question], ScoredAnswer], Iterable[Question]], Iterable[ScoredAnswer]] = map,
) -> Iterator[ScoreResult]:
    """Ask every question, and yield results in order as they come.

    ``each`` is `map`, or an executor's ``map`` for several questions at once.
    """
    questions = list(questions)
    for question, answer in zip(questions, each(ask, questions), strict=True):
        yield ScoreResult(question, answer, is_right(answer.text, question.answer))


@dataclass(slots=True)
class Score:
    """Count results; ``duration_s`` adds up the answers' own times."""

    total: int = 0
    right: int = 0
    num_tokens: int = 0
    duration_s: float = 0.0

    @property
    def fraction(self) -> float:
        """Return the share of right answers, from 0 to 1; 0 without answers."""
        return self.right / self.total if self.total else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Return tokens per second of the answers' own time; 0 if no time was measured."""
        return self.num_tokens / self.duration_s if self.duration_s > 0 else 0.0

    def add(self, result: ScoreResult) -> None:
        """Count one result."""
        self.total += 1
        self.right += result.right
        self.num_tokens += result.answer.num_tokens
        self.duration_s += result.answer.duration_s


@dataclass(slots=True)
class Scoreboard:
    """Count scores in all and by kind, in the order in which kinds were first seen."""

    kinds: dict[str, Score] = field(default_factory=dict)
    overall: Score = field(default_factory=Score)
    _answers: list[str] = field(default_factory=list)

    def add(self, result: ScoreResult) -> None:
        """Count one result."""
        self.kinds.setdefault(result.question.kind, Score()).add(result)
        self.overall.add(result)
        said = json.dumps([result.question.text, result.answer.text])
        self._answers.append(hashlib.sha256(said.encode()).hexdigest())

    @property
    def digest(self) -> str:
        """Return the hex SHA-256 over all questions and answers in any order: equal runs gave the same
        answers.
        """
        return hashlib.sha256("\n".join(sorted(self._answers)).encode()).hexdigest()
