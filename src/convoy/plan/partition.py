"""Layers in proportion to weights, usually memory: the largest-remainder (or Hamilton's) method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from convoy.errors import PlanError


def shares(num_layers: int, weights: Sequence[float | Fraction]) -> list[int]:
    """Return how many of ``num_layers`` each weight gets, at least one; ties go to the lowest index.

    The arithmetic uses exact rationals, so that the same weights give the same plan on every machine. Raises
    PlanError for no weights, more weights than layers, or a weight that is not positive and finite.
    """
    if not weights:
        raise PlanError("no members to share the layers, expected at least one")
    if len(weights) > num_layers:
        raise PlanError(
            f"{len(weights)} members cannot share {num_layers} layers, expected at least one layer for each",
            hint="leave members out, or make them standbys",
        )
    for index, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight > 0):
            raise PlanError(f"weight {weight} of member {index} is not a positive number")
    exact = [Fraction(weight) for weight in weights]
    quotas = [num_layers * weight / sum(exact) for weight in exact]
    counts = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda i: (counts[i] - quotas[i], i))
    for index in by_remainder[: num_layers - sum(counts)]:
        counts[index] += 1
    # Each member needs a layer: move one from the largest share to the first empty one.
    while 0 in counts:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(0)] += 1
    return counts


def partition(num_layers: int, weights: Sequence[float | Fraction]) -> list[tuple[int, int]]:
    """Return `shares` as consecutive [start, end), in order. Raises PlanError as `shares` does."""
    return consecutive(shares(num_layers, weights))


def consecutive(counts: Sequence[int], first: int = 0) -> list[tuple[int, int]]:
    """Return runs of ``counts`` layers as [start, end), the first of them from layer ``first``."""
    runs = []
    for count in counts:
        runs.append((first, first + count))
        first += count
    return runs
