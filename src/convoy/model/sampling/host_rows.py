"""Draw the tokens of several rows at once on the host: `sampling.sample` without its sorts and serial sums.

Sums here have another order than those of the definition, so both have other last bits. A random number
within the error of either sum from a limit is left to the definition. All other tokens are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from convoy.model.sampling.params import SamplingParams
from convoy.model.sampling.sample import Logits

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.intp]

# Logits that one call takes, so that its arrays stay in the cache.
_ELEMENTS = 1 << 17
# Of fewer logits, the definition draws a row in less time than its arrays take to make.
_LEAST_WIDTH = 4096
# Weights that are added at once, and intervals of logits that top-p chooses from.
_RUN = 512
_BINS = 1024
# Twice the rounding of the definition's sum, for each number of it.
_ERROR = 2.0**-51


def rows_at_once(width: int) -> int:
    """Return how many rows of ``width`` logits a call of `draw_tokens` should have."""
    return max(1, _ELEMENTS // width)


def draws_whole_rows(params: SamplingParams, width: int) -> bool:
    """Tell whether `draw_tokens` draws a row faster than the definition.

    With a small top-k, the definition reads few weights itself.
    """
    return width >= _LEAST_WIDTH and not params.greedy and (params.top_k < 1 or params.top_k >= width)


def draw_tokens(logits: Logits, params: Sequence[SamplingParams], random: Floats) -> Ids:
    """Return a token for each row of ``logits`` [rows, vocab], or -1 where the definition must decide.

    The logits are shaped and restricted, and each row has a finite one. ``random`` has a number for each row.
    """
    rows, width = logits.shape
    temperature = np.array([one.temperature for one in params])[:, None]
    padded = -(-width // _RUN) * _RUN
    weights = np.zeros((rows, padded))
    scaled = weights[:, :width]
    peaks = logits.max(axis=1, keepdims=True)
    with np.errstate(over="ignore", under="ignore"):
        np.subtract(logits, peaks, out=scaled, dtype=np.float64)
        scaled /= temperature
        limited = [row for row, one in enumerate(params) if one.top_p < 1]
        bins = _bins(scaled[limited] if len(limited) < rows else scaled) if limited else None
        np.exp(scaled, out=scaled)
    if any(one.min_p > 0 for one in params):
        least = np.array([one.min_p for one in params])[:, None]
        scaled[scaled < least] = 0.0
    sure = np.ones(rows, dtype=np.bool_)
    if bins is not None:
        share = np.array([params[row].top_p for row in limited])
        for row, own, part in zip(limited, bins, share, strict=True):
            sure[row] = _cut(logits[row], scaled[row], own, float(part))
    tokens, certain = _picked(weights, random, width)
    return np.where(sure & certain, tokens, -1)


def _bins(scaled: Floats) -> npt.NDArray[np.intp]:
    """Return the intervals of scaled logits [rows, vocab], from the best. Weights below e^-64 share one."""
    spans = np.minimum(-np.where(np.isfinite(scaled), scaled, 0.0).min(axis=1, keepdims=True), 64.0)
    places: Floats = scaled * (-_BINS / np.maximum(spans, 1e-300))
    np.minimum(places, _BINS - 1, out=places)
    return places.astype(np.intp)


def _cut(logits: Logits, weights: Floats, bins: npt.NDArray[np.intp], top_p: float) -> bool:
    """Set the weights outside top-p to 0. Returns False where the last token within it is not certain."""
    held = np.bincount(bins, weights, _BINS).cumsum()
    total = float(held[-1])
    needed, error = top_p * total, total * len(weights) * _ERROR
    last = min(int(np.searchsorted(held, needed, side="left")), _BINS - 1)
    inside = np.flatnonzero(bins == last)
    # The sort is stable over ascending ids, so ties go to the lowest.
    order = inside[np.argsort(-logits[inside], kind="stable")]
    before = float(held[last - 1]) if last else 0.0
    reached = before + weights[order].cumsum()
    place = int(np.searchsorted(reached, needed, side="left"))
    if place == len(order):
        return False
    below = float(reached[place - 1]) if place else before
    if (below > 0 and needed - below <= error) or float(reached[place]) - needed <= error:
        return False
    weights[bins > last] = 0.0
    weights[order[place + 1 :]] = 0.0
    return True


def _picked(weights: Floats, random: Floats, width: int) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """Return tokens by inverse CDF over weights [rows, runs of `_RUN`], and which are certain."""
    runs = weights.reshape(len(weights), -1, _RUN)
    held = runs.sum(axis=2).cumsum(axis=1)
    row, total = np.arange(len(weights)), held[:, -1]
    target = random * total
    run = np.minimum((held <= target[:, None]).sum(axis=1), held.shape[1] - 1)
    before = np.where(run > 0, held[row, run - 1], 0.0)
    reached = before[:, None] + runs[row, run].cumsum(axis=1)
    place = np.minimum((reached <= target[:, None]).sum(axis=1), _RUN - 1)
    below = np.where(place > 0, reached[row, place - 1], before)
    above, error = reached[row, place], total * width * _ERROR
    certain = ((below == 0) | (target - below > error)) & (above - target > error)
    return run * _RUN + place, certain
