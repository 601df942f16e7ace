"""Clients that stream one answer after the other and compare each with what an undisturbed cluster said."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from convoy.bench.recover import prompt_of
from convoy.cli.local.served_cluster import ServedCluster
from convoy.errors import ConvoyError

_HUNG_UP = 8  # one in so many is hung up on in the middle


@dataclass(frozen=True)
class Question:
    """Hold a question, and the whole text that has to come."""

    body: dict[str, Any]
    answer: str


def make_questions(cluster: ServedCluster, model: str, vocab_size: int, count: int) -> list[Question]:
    """Make short and long prompts, greedy and seeded, with answers from an undisturbed cluster."""
    rng = random.Random(5)
    questions = []
    for number in range(count):
        body = {
            "model": model,
            "prompt": prompt_of(rng.choice((5, 40, 170, 400)), vocab_size, number),
            "max_tokens": rng.choice((12, 48, 120)),
            "ignore_eos": True,
            "temperature": 0.9 * (number % 2),
            "seed": number,
        }
        questions.append(Question(body, "".join(cluster.ask(body))))
    return questions


@dataclass
class Load:
    """Run ``num_clients`` threads that ask until `stop`."""

    cluster: ServedCluster
    questions: Sequence[Question]
    seed: int
    num_clients: int = 4
    failures: list[str] = field(default_factory=list)
    num_answered: int = 0
    num_hung_up: int = 0
    _stopping: threading.Event = field(default_factory=threading.Event)
    _going_on: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _threads: list[threading.Thread] = field(default_factory=list)

    @contextmanager
    def lull(self) -> Iterator[None]:
        """Ask nothing new meanwhile."""
        self._going_on.clear()
        try:
            yield
        finally:
            self._going_on.set()

    def start(self) -> None:
        self._going_on.set()
        for number in range(self.num_clients):
            thread = threading.Thread(target=self._run, args=(random.Random(self.seed + number),))
            self._threads.append(thread)
            thread.start()

    def stop(self, timeout_s: float) -> list[str]:
        """Let every answer come to its end; what went wrong, in words."""
        self._stopping.set()
        self._going_on.set()
        for thread in self._threads:
            thread.join(timeout_s)
        hanging = sum(thread.is_alive() for thread in self._threads)
        return [*self.failures, *([f"{hanging} streams never ended"] if hanging else [])]

    def _run(self, rng: random.Random) -> None:
        while not self._stopping.is_set():
            self._going_on.wait()
            number = rng.randrange(len(self.questions))
            hang_up_after = rng.randrange(1, 8) if rng.randrange(_HUNG_UP) == 0 else None
            failure = self._ask(self.questions[number], hang_up_after)
            if failure is not None:
                with self._lock:
                    self.failures.append(f"question {number}: {failure}")

    def _ask(self, question: Question, hang_up_after: int | None) -> str | None:
        text = ""
        pieces = iter(self.cluster.ask(question.body))
        try:
            for count, piece in enumerate(pieces, 1):
                text += piece
                if count == hang_up_after:
                    with self._lock:
                        self.num_hung_up += 1
                    return None if question.answer.startswith(text) else "it began with another text"
        except ConvoyError as error:
            return f"lost: {error.message}"
        finally:
            getattr(pieces, "close", lambda: None)()
        with self._lock:
            self.num_answered += 1
        if text == question.answer:
            return None
        first = next((i for i, (a, b) in enumerate(zip(text, question.answer, strict=False)) if a != b), None)
        return f"another text: {len(text)} characters of {len(question.answer)}, which differ from {first} on"
