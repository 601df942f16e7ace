"""Lay out the sampling jobs of a step as arrays, for code that draws all rows at once.

A penalty needs the tokens that came before. They are sent with each step, each token once with its count: a
copy that stays on a device would have to follow every preemption, replay and rejected draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from convoy.model.constraints.matcher import mask_bytes
from convoy.model.sampling.output_rows import SampleJob
from convoy.model.sampling.sample import uniform

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Edits:
    """Hold the changes of single logits: each place (row, token) once.

    A logit is divided by its factor if it is positive and multiplied otherwise, then lessened, then raised.
    A banned one is then -inf.
    """

    places: Ids  # [3, edits]: rows, tokens, and 1 where the token is banned
    values: Floats  # [3, edits]: factors, subtrahends, addends


@dataclass(frozen=True, slots=True)
class RowParams:
    """Hold the parameters of all rows of a step.

    The columns of ``table`` are: temperature (0 is greedy), top_p, min_p, the random number in (0, 1), top_k
    (0 is none), and the row of ``masks`` (-1 is none).
    """

    table: npt.NDArray[np.float64]  # [rows, 6]
    masks: npt.NDArray[np.uint8]  # [masked rows, bytes of a mask]
    edits: Edits | None
    cuts_count: bool  # whether any row has a top_k
    cuts_mass: bool  # whether any row has a top_p


def params_of(jobs: Sequence[SampleJob], width: int) -> RowParams:
    """Return the parameters of ``jobs`` for a vocabulary of ``width`` tokens. They must pass `fits`."""
    masks: list[npt.NDArray[np.uint8]] = []
    table = np.array([_line(job, masks, width) for job in jobs], dtype=np.float64).reshape(len(jobs), 6)
    drawn = table[table[:, 0] > 0]
    return RowParams(
        table,
        np.array(masks, dtype=np.uint8).reshape(len(masks), mask_bytes(width)),
        _edits(jobs, width),
        bool((drawn[:, 4] > 0).any()),
        bool((drawn[:, 1] < 1).any()),
    )


def fits(job: SampleJob, width: int) -> bool:
    """Tell whether a job can be laid out. `sample_row` finds the error in one that cannot."""
    if job.mask and (len(job.mask) != mask_bytes(width) or not any(job.mask)):
        return False
    named = (*job.allowed, *job.banned, *job.params.logit_bias)
    return not named or (min(named) >= 0 and max(named) < width)


def _line(job: SampleJob, masks: list[npt.NDArray[np.uint8]], width: int) -> tuple[float, ...]:
    params, place = job.params, -1
    if job.mask or job.allowed:
        place = len(masks)
        masks.append(_mask(job, width))
    if params.greedy:
        return (0.0, 1.0, 0.0, 0.5, 0, place)
    random = uniform(params.seed, job.choice, job.position)
    return (params.temperature, params.top_p, params.min_p, random, max(params.top_k, 0), place)


def _mask(job: SampleJob, width: int) -> npt.NDArray[np.uint8]:
    """Return the mask of a job and its allowed tokens together."""
    size = mask_bytes(width)
    mask = np.frombuffer(job.mask, dtype=np.uint8) if job.mask else np.full(size, 255, dtype=np.uint8)
    if not job.allowed:
        return mask
    bits = np.zeros(8 * size, dtype=np.bool_)
    bits[np.asarray(job.allowed, dtype=np.intp)] = True
    return mask & np.packbits(bits, bitorder="little")


def _edits(jobs: Sequence[SampleJob], width: int) -> Edits | None:
    """Return the edits of all rows, or None if no row has one."""
    if not any(job.params.reshapes or job.banned for job in jobs):
        return None
    seen, said, biased, banned = [], [], [], []
    raised: list[float] = []
    for row, job in enumerate(jobs):
        params, first = job.params, row * width
        repeats = params.repetition_penalty != 1
        looks_back = bool(params.frequency_penalty or params.presence_penalty)
        generated = _ids(job.generated_ids if repeats or looks_back else (), first)
        seen.append(generated if repeats else _ids((), first))
        seen.append(_ids(job.prompt_ids if repeats else (), first))
        said.append(generated if looks_back else _ids((), first))
        biased.append(_ids(tuple(params.logit_bias), first))
        raised.extend(params.logit_bias.values())
        banned.append(_ids(job.banned, first))
    # A place is its row times the width, plus its token: one sort serves all rows.
    again, more, never = np.concatenate(seen), np.concatenate(biased), np.concatenate(banned)
    spoken, counts = np.unique(np.concatenate(said), return_counts=True)
    every = np.unique(np.concatenate([again, spoken, more, never]))
    places = np.zeros((3, len(every)), dtype=np.int32)
    values = np.zeros((3, len(every)), dtype=np.float32)
    places[0], places[1] = every // width, every % width
    places[2, np.searchsorted(every, never)] = 1
    repetition, frequency, presence = (
        np.array([getattr(job.params, name) for job in jobs], dtype=np.float64)
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
    )
    values[0] = 1.0
    values[0, np.searchsorted(every, again)] = repetition[again // width]
    row_of = spoken // width
    values[1, np.searchsorted(every, spoken)] = frequency[row_of] * counts + presence[row_of]
    values[2, np.searchsorted(every, more)] = raised
    return Edits(places, values)


def _ids(ids: Sequence[int], first: int) -> npt.NDArray[np.int64]:
    return np.asarray(ids, dtype=np.int64) + first
