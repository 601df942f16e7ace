"""What a model answered, whether that was right, and how many were: by kind and over all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from convoy.evaluate.questions import Question


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """What a model said, and what it took."""

    text: str
    num_tokens: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """A question with the model's answer."""

    question: Question
    answer: ScoredAnswer
    right: bool


def is_right(answer: str, expected: str) -> bool:
    """Whether an answer equals the expected one, outer white space apart."""
    return answer.strip() == expected.strip()


def ask_all(
    questions: Iterable[Question],
    ask: Callable[[Question], ScoredAnswer],
    each: Callable[[Callable[[Question], ScoredAnswer], Iterable[Question]], Iterable[ScoredAnswer]] = map,
) -> Iterator[ScoreResult]:
    """Ask every question, yielding results in order as they come.

    ``each`` is `map`, or an executor's ``map`` for several questions at once.
    """
    questions = list(questions)
    for question, answer in zip(questions, each(ask, questions), strict=True):
        yield ScoreResult(question, answer, is_right(answer.text, question.answer))


@dataclass(slots=True)
class Score:
    """Counts over some results; ``duration_s`` adds up the answers' own times."""

    total: int = 0
    right: int = 0
    num_tokens: int = 0
    duration_s: float = 0.0

    @property
    def fraction(self) -> float:
        """Right answers of all, from 0 to 1; 0 where nothing was asked."""
        return self.right / self.total if self.total else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens by the answers' own time; 0 where none was measured."""
        return self.num_tokens / self.duration_s if self.duration_s > 0 else 0.0

    def add(self, result: ScoreResult) -> None:
        """Count one result."""
        self.total += 1
        self.right += result.right
        self.num_tokens += result.answer.num_tokens
        self.duration_s += result.answer.duration_s


@dataclass(slots=True)
class Scoreboard:
    """Scores by kind, in the order in which kinds were first seen, and over all."""

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
        """Hex SHA-256 over every question and answer, whatever their order: equal runs said the same."""
        return hashlib.sha256("\n".join(sorted(self._answers)).encode()).hexdigest()
