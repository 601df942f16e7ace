"""Sample a token from logits: the same logits, parameters, choice and position always give the same token.

The random number of a token is a hash of (seed, choice index, position). The batch around a row, the plan, or
a replay after a loss therefore cannot change a text. The number picks by inverse CDF in float64 over the
candidates in ascending id order.

The order of operations is vLLM's: repetition, frequency and presence penalties; logit bias; the grammar's
mask and banned tokens; temperature; min-p; top-k; top-p. Log-probabilities are of the raw distribution,
before all of these, as vLLM's are by default.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from convoy.errors import StepError
from convoy.model.sampling.params import SamplingParams

Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]

# the float32 -inf
_MINUS_INF_BITS = np.uint32(0xFF800000)

# numbers of candidates that top-p sorts, before it sorts the whole vocabulary
_CUTS = (1024, 16384)
# values of which `best_ids` first takes the greatest
_GROUP = 32


@dataclass(frozen=True, slots=True)
class Sampled:
    """Hold a token; ``logprob`` and ``top`` (best first, ties to the lower id) are of the raw distribution.

    ``logprob`` is NaN if it was not requested, as it costs a pass over the vocabulary. The ``rank`` of a
    prompt's token counts from 1, the best; it is 0 for a sampled token.
    """

    token_id: int
    logprob: float = math.nan
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


def sample(
    logits: Logits,
    params: SamplingParams,
    *,
    choice: int,
    position: int,
    prompt_ids: Sequence[int],
    generated_ids: Sequence[int],
    allowed: Sequence[int] = (),
    banned: Sequence[int] = (),
    mask: bytes = b"",
) -> Sampled:
    """Sample the token at ``position`` of choice ``choice`` from ``logits``, [vocab] float32 (never changed).

    Only an ``allowed`` token is sampled, or any if there are none, and never a ``banned`` one. A ``mask`` has
    one bit for each token, the lowest first, and a token with a 0 is not sampled. Raises StepError if a logit
    is not finite or no token is left, and RequestError if a biased token is not in the vocabulary.
    """
    shaped = shape(
        logits,
        params,
        prompt_ids=prompt_ids,
        generated_ids=generated_ids,
        allowed=allowed,
        banned=banned,
        mask=mask,
    )
    if params.greedy:
        token_id = int(shaped.argmax())
    else:
        token_id = _sample_token(shaped, params, uniform(params.seed, choice, position))
    return scored(logits, token_id, params.logprobs)


def shape(
    logits: Logits,
    params: SamplingParams,
    *,
    prompt_ids: Sequence[int],
    generated_ids: Sequence[int],
    allowed: Sequence[int],
    banned: Sequence[int],
    mask: bytes,
) -> Logits:
    """Return the logits that a token is chosen from, or ``logits`` itself where nothing changes them.

    Raises as `sample` does.
    """
    check_finite(logits)
    shaped = _reshape(logits, params, prompt_ids, generated_ids) if params.reshapes else logits
    return _restrict(shaped, allowed, banned, mask) if allowed or banned or mask else shaped


def scored(logits: Logits, token_id: int, num_top: int | None) -> Sampled:
    """Return a sampled token, with its log-probability unless ``num_top`` is None."""
    return Sampled(token_id) if num_top is None else _score(logits, token_id, num_top)


def prompt_logprob(logits: Logits, token_id: int, num_top: int) -> Sampled:
    """Score a prompt's token by the ``logits`` [vocab] that predict it. Raises StepError as `sample` does."""
    check_finite(logits)
    scored = _score(logits, token_id, num_top)
    return replace(scored, rank=_rank(logits, token_id))


def uniform(seed: int, choice: int, position: int) -> float:
    """Return the random number in (0, 1) of one token.

    It consists of 52 bits of SHA-256 over a label and the three numbers as little-endian 64-bit words,
    centred in their interval. This is a counter-based generator (Salmon et al., "Parallel random numbers: as
    easy as 1, 2, 3", 2011) with an output that no library version can change.
    """
    # with one more bit, adding 0.5 would be rounded, and the greatest number would become 1 itself
    words = struct.pack("<QQQ", seed % 2**64, choice, position)
    digest = hashlib.sha256(b"convoy sampling v1" + words).digest()
    return ((int.from_bytes(digest[:8], "little") >> 12) + 0.5) * 2.0**-52


def check_finite(logits: Logits) -> None:
    """Raise StepError if any logit is NaN or infinite, because no valid sample exists then."""
    # a sum meets every NaN and infinity in one cheap pass; count them only if the sum is not finite
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(logits.sum())
    if math.isfinite(total):
        return
    num_bad = int(logits.size - np.isfinite(logits).sum())
    if num_bad:
        raise StepError(f"{num_bad} of {logits.size} logits are not finite, expected none")


def _reshape(
    logits: Logits, params: SamplingParams, prompt_ids: Sequence[int], generated_ids: Sequence[int]
) -> Logits:
    shaped = logits.copy()
    if params.repetition_penalty != 1:
        seen = np.unique(np.concatenate([_as_ids(prompt_ids), _as_ids(generated_ids)]))
        values = shaped[seen]
        penalty = np.float32(params.repetition_penalty)
        shaped[seen] = np.where(values > 0, values / penalty, values * penalty)
    if generated_ids and (params.frequency_penalty or params.presence_penalty):
        # these two penalties look at generated tokens only, as OpenAI defines them
        said, counts = np.unique(_as_ids(generated_ids), return_counts=True)
        shaped[said] -= (params.frequency_penalty * counts + params.presence_penalty).astype(np.float32)
    if params.logit_bias:
        params.check_vocabulary(len(shaped))
        biased = _as_ids(list(params.logit_bias))
        shaped[biased] += np.fromiter(params.logit_bias.values(), np.float32, len(biased))
    check_finite(shaped)
    return shaped


def _restrict(logits: Logits, allowed: Sequence[int], banned: Sequence[int], mask: bytes) -> Logits:
    ids = _as_ids([*allowed, *banned])
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= len(logits)):
        raise StepError(f"a restricted token is outside the vocabulary of {len(logits)}")
    restricted = _masked(logits, mask) if mask else logits.copy()
    if allowed:
        kept = _as_ids(allowed)
        values = restricted[kept]
        restricted = np.full_like(logits, -np.inf)
        restricted[kept] = values
    restricted[_as_ids(banned)] = -np.inf
    if restricted.max() == -np.inf:
        raise StepError(f"none of {len(logits)} tokens may be sampled, expected at least one")
    return restricted


def _masked(logits: Logits, mask: bytes) -> Logits:
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
    if len(bits) < len(logits):
        raise StepError(f"a mask has {len(bits)} tokens, expected {len(logits)}")
    # Bitwise: a choice by element takes seven times as long where the bits alternate. A 0 keeps no bit
    # of the logit and all those of -inf, and a 1 the other way round.
    keep = np.negative(bits[: len(logits)].astype(np.uint32))
    kept = np.ascontiguousarray(logits).view(np.uint32) & keep
    return (kept | (~keep & _MINUS_INF_BITS)).view(np.float32)


def _rank(logits: Logits, token_id: int) -> int:
    """Return the place of a token among all, from 1; of equal logits the lowest id comes first."""
    value = logits[token_id]
    num_better = int(np.count_nonzero(logits > value))
    return 1 + num_better + int(np.count_nonzero(logits[:token_id] == value))


def _as_ids(ids: Sequence[int]) -> Ids:
    return np.asarray(ids, dtype=np.intp)


def _sample_token(logits: Logits, params: SamplingParams, random: float) -> int:
    candidates = None if params.top_k < 1 else best_ids(logits, params.top_k)
    kept = logits if candidates is None else logits[candidates]
    # at the smallest temperatures a quotient may overflow to -inf, which correctly gets the weight 0
    with np.errstate(over="ignore", under="ignore"):
        scaled = (kept.astype(np.float64) - float(kept.max())) / params.temperature
        weights = np.exp(scaled)
    # the best token's weight is 1, so min-p bounds the weight itself (and commutes with top-k)
    weights[weights < params.min_p] = 0.0
    if params.top_p < 1:
        weights[~_nucleus(kept, weights, params.top_p)] = 0.0
    cumulative = weights.cumsum()
    index = int(np.searchsorted(cumulative, random * cumulative[-1], side="right"))
    return index if candidates is None else int(candidates[index])


def best_ids(values: Logits, count: int) -> Ids:
    """Return the ``count`` ids with the greatest values, ascending by id; of equal values the lowest ids."""
    if count >= len(values):
        return np.arange(len(values), dtype=np.intp)
    if count * _GROUP * 2 < len(values):
        # The best ``count`` of the groups' greatest values are as many values, so none below them is chosen.
        whole = len(values) // _GROUP * _GROUP
        greatest = values[:whole].reshape(-1, _GROUP).max(axis=1)
        near = np.flatnonzero(values >= np.partition(greatest, len(greatest) - count)[len(greatest) - count])
        return near[_best(values[near], count)]
    return _best(values, count)


def _best(values: Logits, count: int) -> Ids:
    """Return the places of the ``count`` greatest of at least as many values, as `best_ids` does."""
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > threshold)
    level = np.flatnonzero(values == threshold)[: count - len(above)]
    return np.sort(np.concatenate([above, level]))


def _nucleus(logits: Logits, weights: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.bool_]:
    """Return a mask of the fewest best tokens that hold ``top_p`` of the weight.

    It includes the token that crosses ``top_p``.
    """
    needed = top_p * float(weights.sum())
    mask = np.zeros(len(weights), dtype=np.bool_)
    for count in (*_CUTS, len(logits)):
        ids = best_ids(logits, count)
        # the sort is stable over ascending ids, so ties go to the lowest
        order = ids[np.argsort(-logits[ids], kind="stable")]
        cumulative = weights[order].cumsum()
        if cumulative[-1] >= needed or len(ids) == len(logits):
            break
    num_kept = int(np.searchsorted(cumulative, needed, side="left")) + 1
    mask[order[:num_kept]] = True
    return mask


def _score(logits: Logits, token_id: int, num_top: int) -> Sampled:
    peak = float(logits.max())
    log_total = peak + math.log(float(np.exp(logits - np.float32(peak)).sum(dtype=np.float64)))
    top: tuple[tuple[int, float], ...] = ()
    if num_top > 0:
        ids = best_ids(logits, num_top)
        order = ids[np.argsort(-logits[ids], kind="stable")]
        top = tuple((int(best), float(logits[best]) - log_total) for best in order)
    return Sampled(token_id, float(logits[token_id]) - log_total, top)
