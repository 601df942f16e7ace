"""How often a measured value fell under each of some bounds: the form in which Prometheus takes times."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class HistogramCounts:
    """``cumulative[i]`` values were at most ``bounds[i]``; its last entry, one more, counts all."""

    bounds: tuple[float, ...]
    cumulative: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        return self.cumulative[-1]


class Histogram:
    """Thread-safe: whoever reads sees each value whole or not at all."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds``: ascending; what is above the last is counted too."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        place = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[place] += 1
            self._sum += value

    def snapshot(self) -> HistogramCounts:
        with self._lock:
            counts, total = tuple(self._counts), self._sum
        return HistogramCounts(self._bounds, tuple(accumulate(counts)), total)
