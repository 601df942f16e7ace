"""Who was given up for holding everybody up: used only where it must be, until it was here long enough."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

TRUSTED_AFTER_S = 60.0


class Slow:
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
