"""Measure how long a request spends in each part of its way, by one monotonic clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

# Segments are in the order in which a request meets them. Every request has each, 0 where it does not apply.
SEGMENTS = (
    "parse",
    "reserve",
    "route",
    "queue_wait",
    "encrypt",
    "dispatch",
    "coordinator_to_provider",
    "first_token",
    "total_e2e",
)


class Timing:
    """Measure from the request's arrival. Tries after a failure add to the times of the earlier ones."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, *, parts: bool = False) -> None:
        """Start the clock. ``parts``: keep also when each segment ran, for traces."""
        self._clock = clock
        self._parts: list[tuple[str, float, float]] | None = [] if parts else None
        self.began_s = clock()
        self._spent_s = dict.fromkeys(SEGMENTS, 0.0)

    @contextmanager
    def measure(self, segment: str) -> Iterator[None]:
        """Count the time inside as ``segment``, also if it raises."""
        began = self._clock()
        try:
            yield
        finally:
            self.add(segment, self._clock() - began)

    def add(self, segment: str, seconds: float) -> None:
        """Add seconds to ``segment``. Raises KeyError for one that is not in SEGMENTS."""
        self._spent_s[segment] = self._spent_s[segment] + max(0.0, seconds)
        if self._parts is not None:
            end_s = self.age_s
            self._parts.append((segment, max(0.0, end_s - seconds), end_s))

    def reach(self, segment: str) -> None:
        """Set ``segment`` to the time since the request came: for first_token and total_e2e."""
        self._spent_s[segment] = self.age_s

    @property
    def age_s(self) -> float:
        """Return the seconds since the request came."""
        return self._clock() - self.began_s

    def parts(self) -> list[tuple[str, float, float]]:
        """Return each segment that took time, once per try: its name, start and end.

        Times are in seconds since the request came.
        """
        first_s = self._spent_s["first_token"]
        reached = [("first_token", 0.0, first_s)] if first_s else []
        return [*(self._parts or ()), *reached]

    def us(self) -> dict[str, int]:
        """Return whole microseconds by segment: at least 1 if any time was spent."""
        return {
            f"{segment}_us": max(1, round(1e6 * seconds)) if seconds else 0
            for segment, seconds in self._spent_s.items()
        }

    def header(self) -> dict[str, str]:
        """Return X-Timing with the times so far."""
        return {"x-timing": msgspec.json.encode(self.us()).decode()}

    def seconds(self) -> dict[str, float]:
        """Return seconds by segment."""
        return dict(self._spent_s)
