"""Percentiles by nearest rank: no value is made up."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that ``percent`` of all do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]
