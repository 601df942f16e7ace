"""Members that answer, but late, whenever a step is late: each step comes, and everybody crawls."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

_LATE_S = 0.4  # a member that computes answers in milliseconds: another thread of it does
_MAX_TIMES = 3
_WITHIN_S = 60.0


class Laggards:
    """Told of every look at a late step."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._seen_s: dict[str, list[float]] = {}

    def note(self, answers: Mapping[str, float]) -> str | None:
        """The slowest of those who took so many seconds to answer a ping, if it was late; else None."""
        slowest = max(answers, key=lambda name: answers[name], default=None)
        if slowest is None or answers[slowest] < _LATE_S:
            return None
        now = self._now()
        seen = [at for at in self._seen_s.get(slowest, ()) if now - at < _WITHIN_S]
        self._seen_s[slowest] = [*seen, now]
        return slowest

    def is_one(self, name: str) -> bool:
        """Whether that was so again and again, lately."""
        now = self._now()
        return sum(now - at < _WITHIN_S for at in self._seen_s.get(name, ())) >= _MAX_TIMES

    def forget(self, name: str) -> None:
        """It was given up; the next time counts from the beginning."""
        self._seen_s.pop(name, None)
