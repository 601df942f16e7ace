"""Compute percentiles by nearest rank, so that each is a value that was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least ``percent`` of all values do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]
