"""How long to wait before the next try: twice as long each time, and never in step with others."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

FIRST_S = 0.02
LONGEST_S = 5.0
STAYED_S = 10.0


class Backoff:
    """20 ms doubling to 5 s, each cut by up to a half at random."""

    def __init__(self, first_s: float = FIRST_S, longest_s: float = LONGEST_S) -> None:
        self._next_s = first_s
        self._longest_s = longest_s

    def next_s(self) -> float:
        """How long to wait now."""
        wait_s = self._next_s
        self._next_s = min(2 * wait_s, self._longest_s)
        return wait_s * random.uniform(0.5, 1.0)  # noqa: S311 - spread, no secret


class Backoffs:
    """One for each member that is sought. Who went within 10 s of coming is sought as one that did not come:
    otherwise one that ends each link at once would be dialled without a pause.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._of: dict[str, Backoff] = {}
        self._came_s: dict[str, float] = {}

    def came(self, name: str) -> None:
        """It is here."""
        self._came_s[name] = self._now()

    def begin(self, name: str) -> tuple[Backoff, float]:
        """A new search: its backoff, and how long to wait before the first try."""
        if self._now() - self._came_s.get(name, -math.inf) > STAYED_S:
            self._of[name] = Backoff()
            return self._of[name], 0.0
        backoff = self._of.setdefault(name, Backoff())
        return backoff, backoff.next_s()
