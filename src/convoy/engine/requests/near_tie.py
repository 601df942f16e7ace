"""Report near-ties: positions where a text may differ from the same text without a loss.

If new stages are not bit-exact with those before (an inexact kernel, or members with other bits), a replay
gives slightly different numbers. Text already sent stays. At a later token of a greedy text, the second-best
token may win if the two best are closer than that difference. Each such token is reported.

Measured over 128 tokens run one by one and all at once, with ``plain-f32`` on a 2.5 GHz AVX-512 core: the
distance between a position's two best moved by at most 1.8e-5 (`demo`) and 0.8e-5 (`llama-250m`).
"""

from __future__ import annotations

from dataclasses import replace

from convoy.model.sampling.params import SamplingParams
from convoy.model.sampling.sample import Sampled

# Between the two best log-probabilities; about fifty times the largest measured change in float32. Kernels
# that round further have the published distance from the unsplit stage (`config.kernels.ErrorBounds`).
NEAR_TIE = 1e-3
_NUM_BEST = 2


def can_tell(params: SamplingParams) -> bool:
    """Return whether the two best tokens show how close another was: not if chance or a penalty chose."""
    return params.greedy and not params.reshapes


def with_two_best(params: SamplingParams) -> SamplingParams:
    """Return ``params`` that ask for the two best tokens beside the sampled one."""
    return replace(params, logprobs=max(_NUM_BEST, params.logprobs or 0))


def is_near_tie(sampled: Sampled, within: float = NEAR_TIE) -> bool:
    """Return whether another token was closer than ``within``; False without two best tokens."""
    if len(sampled.top) < _NUM_BEST:
        return False
    (_, best), (_, second) = sampled.top[:_NUM_BEST]
    return best - second < within
