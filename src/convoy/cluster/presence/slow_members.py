"""Members that were given up because they held the others up.

They are used only if they must be, for a while.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

# A member that computes still answers in milliseconds, because another of its threads does.
_LATE_S = 0.4
# Times slower than the quickest member. If all are late, the head or its network is the reason.
_TIMES_SLOWER = 3.0
_MAX_TIMES = 3
_WITHIN_S = 60.0


class LateMembers:
    """Count how often each member was late at a late step. Of several looks at one step, the first counts."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        # By member, then by step.
        self._seen_s: dict[str, dict[int, float]] = {}

    def note(self, step: int, answers: Mapping[str, float]) -> str | None:
        """Return the slowest of ``answers`` (seconds to answer a ping) if it alone was late; else None."""
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
        """Return whether ``name`` was late again and again, lately."""
        now = self._now()
        return sum(now - at < _WITHIN_S for at in self._seen_s.get(name, {}).values()) >= _MAX_TIMES

    def forget(self, name: str) -> None:
        """Forget the counts of a member that was given up."""
        self._seen_s.pop(name, None)


TRUSTED_AFTER_S = 60.0


class SlowMembers:
    """Hold the slow members by name. Any thread may read; every change is one assignment."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        # The time at which each member came back; None if it has not.
        self._since_s: dict[str, float | None] = {}

    def add(self, name: str) -> None:
        """Note that a member was given up for being slow."""
        self._since_s[name] = None

    def came(self, name: str) -> None:
        """Note that a member is connected again."""
        if name in self._since_s:
            self._since_s[name] = self._now()

    def left_s(self, name: str) -> float:
        """Return for how many seconds a member still counts as slow; infinity while it is not connected."""
        since_s = self._since_s.get(name, -math.inf)
        return math.inf if since_s is None else max(0.0, since_s + TRUSTED_AFTER_S - self._now())

    def names(self) -> set[str]:
        """Return the members that count as slow now."""
        return {name for name in tuple(self._since_s) if self.left_s(name) > 0.0}
