"""How long to wait before the next try: twice as long each time, and never in step with others."""

from __future__ import annotations

import random

FIRST_S = 0.02
LONGEST_S = 5.0


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
