"""Process each row for the output's owner: sample a token, score one, return the logits or the final state.

The head sends these jobs for every output of a step when it submits the step. It therefore does not matter
which stage owns the output.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from convoy.errors import ConvoyError, StepError
from convoy.model.sampling.host_rows import draw_tokens, draws_whole_rows, rows_at_once
from convoy.model.sampling.params import SamplingParams
from convoy.model.sampling.sample import Sampled, prompt_logprob, sample, scored, shape, uniform

Logits = npt.NDArray[np.float32]
# The state of one token behind the final norm.
FinalState = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SampleJob:
    """Sample the token at ``position``; with ``score``, score that token there instead.

    ``prompt_ids`` and ``generated_ids`` are all tokens before ``position``. They are read only if ``params``
    has a penalty on earlier tokens. No penalty counts repetitions in the prompt, so each prompt token is
    needed only once; see `distinct`. Only ``allowed`` tokens are sampled, or any if it is empty, and never a
    ``banned`` one. With a ``mask`` (`constraints.matcher`), only tokens that it has are sampled. A job that
    ``wants_state`` samples nothing: its result is the state behind the final norm.
    """

    params: SamplingParams
    choice: int
    position: int
    prompt_ids: Sequence[int] = ()
    generated_ids: Sequence[int] = ()
    score: int | None = None
    wants_logits: bool = False
    allowed: Sequence[int] = ()
    banned: Sequence[int] = ()
    mask: bytes = b""
    wants_state: bool = False


@dataclass(frozen=True, slots=True)
class SampleResult:
    """Hold the result of a `SampleJob`. With an ``error``, no token is sampled and ``sampled`` is
    meaningless. Unless it ``feeds``, a stage that takes its own samples has another token in this place.
    """

    sampled: Sampled
    logits: Logits | None = None
    error: ConvoyError | None = None
    state: FinalState | None = None
    feeds: bool = True


@dataclass(frozen=True, slots=True)
class SampleTask:
    """Hold finished samples. The task for samples that a device still computes has the same interface.

    The latter is in `model.backends.cuda.sampling`.
    """

    done: tuple[SampleResult, ...]

    def outcomes(self) -> tuple[SampleResult, ...]:
        """Return one result for each job, in order."""
        return self.done


GREEDY = SampleJob(SamplingParams(temperature=0.0), choice=0, position=0)


def distinct(tokens: Sequence[int]) -> Sequence[int]:
    """Return each of ``tokens`` once, ascending. Made once for a prompt, it is cheap to sample with and to
    encode.
    """
    return array("I", sorted(set(tokens)))


def sample_all(logits: Logits, jobs: Sequence[SampleJob]) -> tuple[SampleResult, ...]:
    """Return one result per row of ``logits`` [num_outputs, vocabulary], as `sample_row` gives it.

    Rows that are drawn from the whole vocabulary are drawn together. Raises StepError if the counts of rows
    and jobs differ.
    """
    if len(logits) != len(jobs):
        raise StepError(f"a step has {len(logits)} outputs and {len(jobs)} sample jobs")
    drawn = _draw_together(logits, jobs)
    return tuple(
        drawn[index] if index in drawn else sample_row(row, job)
        for index, (row, job) in enumerate(zip(logits, jobs, strict=True))
    )


def _draw_together(logits: Logits, jobs: Sequence[SampleJob]) -> dict[int, SampleResult]:
    """Return the results of rows that are drawn from the whole vocabulary, and succeed, by row."""
    width = logits.shape[1]
    rows = [
        index
        for index, job in enumerate(jobs)
        if job.score is None and not job.wants_state and draws_whole_rows(job.params, width)
    ]
    found: dict[int, SampleResult] = {}
    for start in range(0, len(rows), rows_at_once(width)):
        shaped: dict[int, Logits] = {}
        for index in rows[start : start + rows_at_once(width)]:
            # `sample_row` finds the error again, for the row's own result.
            with suppress(ConvoyError):
                shaped[index] = _shape(logits[index], jobs[index])
        if shaped:
            chosen = [jobs[index] for index in shaped]
            random = [uniform(one.params.seed, one.choice, one.position) for one in chosen]
            block = np.stack(list(shaped.values())) if len(shaped) > 1 else next(iter(shaped.values()))[None]
            tokens = draw_tokens(block, [one.params for one in chosen], np.array(random))
            for index, job, token in zip(shaped, chosen, tokens.tolist(), strict=True):
                if token >= 0:
                    sampled = scored(logits[index], token, job.params.logprobs)
                    kept = logits[index].copy() if job.wants_logits else None
                    found[index] = SampleResult(sampled, kept)
    return found


def _shape(logits: Logits, job: SampleJob) -> Logits:
    return shape(
        logits,
        job.params,
        prompt_ids=job.prompt_ids,
        generated_ids=job.generated_ids,
        allowed=job.allowed,
        banned=job.banned,
        mask=job.mask,
    )


def rows_with_state(jobs: Sequence[SampleJob]) -> list[int]:
    """Return the indices of the jobs that want a final state."""
    return [index for index, job in enumerate(jobs) if job.wants_state]


def with_states(
    results: tuple[SampleResult, ...], jobs: Sequence[SampleJob], states: Callable[[list[int]], FinalState]
) -> tuple[SampleResult, ...]:
    """Return ``results`` with the final states of the jobs that want one.

    ``states`` returns those of some rows, [rows, output_size]. It is called only if there are any.
    """
    wanted = rows_with_state(jobs)
    if not wanted:
        return results
    filled = list(results)
    for index, state in zip(wanted, states(wanted), strict=True):
        error = None if np.isfinite(state).all() else StepError("a final state is not finite")
        filled[index] = replace(results[index], state=None if error else state.copy(), error=error)
    return tuple(filled)


def sample_row(logits: Logits, job: SampleJob) -> SampleResult:
    """Return the result of one row [vocabulary]. An error belongs to this row, and does not fail the step."""
    if job.wants_state:
        return SampleResult(Sampled(0, 0.0))
    try:
        sampled = _sample_row(logits, job)
    except ConvoyError as error:
        return SampleResult(Sampled(0), error=error)
    return SampleResult(sampled, logits.copy() if job.wants_logits else None)


def _sample_row(logits: Logits, job: SampleJob) -> Sampled:
    if job.score is not None:
        return prompt_logprob(logits, job.score, job.params.logprobs or 0)
    return sample(
        logits,
        job.params,
        choice=job.choice,
        position=job.position,
        prompt_ids=job.prompt_ids,
        generated_ids=job.generated_ids,
        allowed=job.allowed,
        banned=job.banned,
        mask=job.mask,
    )
