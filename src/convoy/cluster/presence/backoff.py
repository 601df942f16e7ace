"""How long to wait before the next try: twice as long each time, and never in step with other members."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

FIRST_S = 0.02
LONGEST_S = 5.0
STAYED_S = 10.0


class Backoff:
    """Grow a wait from 20 ms, doubling to 5 s, each cut by up to a half at random."""

    def __init__(self, first_s: float = FIRST_S, longest_s: float = LONGEST_S) -> None:
        self._next_s = first_s
        self._longest_s = longest_s

    def next_s(self) -> float:
        """Return the seconds to wait now, and double the next wait."""
        wait_s = self._next_s
        self._next_s = min(2 * wait_s, self._longest_s)
        return wait_s * random.uniform(0.5, 1.0)  # noqa: S311 - spread, no secret


class Backoffs:
    """Hold one backoff for each member that is dialled.

    A member that left within 10 s of its arrival keeps its backoff, as if it had not come. Otherwise a
    member that ends each link at once would be dialled without a pause.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._of: dict[str, Backoff] = {}
        self._came_s: dict[str, float] = {}

    def came(self, name: str) -> None:
        """Note that a member is connected."""
        self._came_s[name] = self._now()

    def begin(self, name: str) -> tuple[Backoff, float]:
        """Start a new search. Returns its backoff, and the seconds to wait before the first try."""
        if self._now() - self._came_s.get(name, -math.inf) > STAYED_S:
            self._of[name] = Backoff()
            return self._of[name], 0.0
        backoff = self._of.setdefault(name, Backoff())
        return backoff, backoff.next_s()
