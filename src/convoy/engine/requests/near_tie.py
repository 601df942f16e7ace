"""Where a text may part from what it would have been without a loss: two tokens that are nearly alike.

Where stages do not compute to the bit what those before them did (a kernel that is not exact, members whose
bits differ), what is run again comes out a little other. What was said stays; but at a later token of a
greedy text whose two best are closer than that, the other one may win. Each such token is told.

Measured over 128 tokens run one by one and all at once, with ``plain-f32`` on a 2.5 GHz AVX-512 core: the
distance between a position's two best moved by at most 1.8e-5 (`demo`) and 0.8e-5 (`llama-250m`).
"""

from __future__ import annotations

from dataclasses import replace

from convoy.model.sampling.params import SamplingParams
from convoy.model.sampling.sample import Sampled

NEAR_TIE = 1e-3  # between the two best log-probabilities; some fifty times what was measured
_NUM_BEST = 2


def can_tell(params: SamplingParams) -> bool:
    """Whether the two best say how nearly another token would have won: not if chance or a penalty chose."""
    return params.greedy and not params.reshapes


def with_two_best(params: SamplingParams) -> SamplingParams:
    """``params`` that bring the two best tokens back with the one that is drawn."""
    return replace(params, logprobs=max(_NUM_BEST, params.logprobs or 0))


def is_near_tie(sampled: Sampled) -> bool:
    """Whether another token was within `NEAR_TIE`. What has no two best is none."""
    if len(sampled.top) < _NUM_BEST:
        return False
    (_, best), (_, second) = sampled.top[:_NUM_BEST]
    return best - second < NEAR_TIE
