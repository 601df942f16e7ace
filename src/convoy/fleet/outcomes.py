"""Name how a request ended: as a word for logs, as a label, and as a count."""

from __future__ import annotations

import asyncio
import re
from collections import Counter

from convoy.api.refusals import ClientGone
from convoy.cluster.metrics.families import Metric, counter

# The limit of one metric's sets of labels. A provider that registers ever new models makes no more.
_MAX_SERIES = 2000
_OTHERS = "(other)"


class LabelSums:
    """Sum amounts by labels. Beyond ``max_series`` sets of labels, all others share one."""

    def __init__(self, *labels: str, max_series: int = _MAX_SERIES) -> None:
        self._max_series = max_series
        self._labels = labels
        self._sums: Counter[tuple[str, ...]] = Counter()

    def add(self, *values: str, amount: int = 1) -> None:
        if values not in self._sums and len(self._sums) >= self._max_series:
            values = (_OTHERS,) * len(self._labels)
        self._sums[values] += amount

    def get(self, *values: str) -> int:
        """Return the sum of these labels."""
        return self._sums.get(values, 0)

    def totals(self, label: str) -> dict[str, int]:
        """Return the sums by one label."""
        place, found = self._labels.index(label), Counter[str]()
        for values, amount in self._sums.items():
            found[values[place]] += amount
        return dict(found)

    def family(self, name: str, text: str) -> Metric:
        sums = sorted(self._sums.items())
        return counter(name, text, [(dict(zip(self._labels, key, strict=True)), n) for key, n in sums])


def outcome_of(error: BaseException) -> str:
    """Return a word for the log."""
    gone = isinstance(error, asyncio.CancelledError | ClientGone)
    return "client gone" if gone else type(error).__name__


def word_of(outcome: str) -> str:
    """Return a log line's outcome as a label: `QueueFull` is queue_full, "client gone" is client_gone."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|\s+", "_", outcome or "unknown").lower()
