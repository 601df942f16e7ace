"""Who was given up for holding everybody up: used only where it must be, until it was here long enough."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

_LATE_S = 0.4  # a member that computes answers in milliseconds: another thread of it does
_TIMES_SLOWER = 3.0  # than the quickest: where all are late, the head or its network is
_MAX_TIMES = 3
_WITHIN_S = 60.0


class LateMembers:
    """Told of looks at late steps; of several at one step the first counts."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._seen_s: dict[str, dict[int, float]] = {}  # by step

    def note(self, step: int, answers: Mapping[str, float]) -> str | None:
        """The slowest of those who took so many seconds to answer a ping, if it alone was late; else None."""
        slowest = max(answers, key=lambda name: answers[name], default=None)
        if slowest is None or answers[slowest] < _LATE_S:
            return None
        others = [after_s for name, after_s in answers.items() if name != slowest]
        if others and answers[slowest] < _TIMES_SLOWER * min(others):
            return None
        now = self._now()
        seen = {one: at for one, at in self._seen_s.get(slowest, {}).items() if now - at < _WITHIN_S}
        self._seen_s[slowest] = {step: now} | seen
        return slowest

    def is_one(self, name: str) -> bool:
        """Whether that was so again and again, lately."""
        now = self._now()
        return sum(now - at < _WITHIN_S for at in self._seen_s.get(name, {}).values()) >= _MAX_TIMES

    def forget(self, name: str) -> None:
        """It was given up; the next time counts from the beginning."""
        self._seen_s.pop(name, None)


TRUSTED_AFTER_S = 60.0


class SlowMembers:
    """By name. Read from any thread; every change is one assignment."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since_s: dict[str, float | None] = {}  # when each came back; None: not yet

    def add(self, name: str) -> None:
        """It was given up."""
        self._since_s[name] = None

    def came(self, name: str) -> None:
        """It answers again."""
        if name in self._since_s:
            self._since_s[name] = self._now()

    def left_s(self, name: str) -> float:
        """How long it still counts as slow; for ever while it is not here."""
        since_s = self._since_s.get(name, -math.inf)
        return math.inf if since_s is None else max(0.0, since_s + TRUSTED_AFTER_S - self._now())

    def names(self) -> set[str]:
        """Who counts as slow now."""
        return {name for name in tuple(self._since_s) if self.left_s(name) > 0.0}
