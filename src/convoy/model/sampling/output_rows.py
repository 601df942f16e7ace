"""What the owner of the output does with each row of logits: draw a token, score one, or hand the logits out.

The head says it for every output of a step when it submits the step, so that it does not matter where the
output is.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from convoy.errors import ConvoyError, StepError
from convoy.model.sampling.params import SamplingParams
from convoy.model.sampling.sample import Sampled, prompt_logprob, sample

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SampleJob:
    """Draw the token at ``position``; with ``score``, score that token there instead.

    ``prompt_ids`` and ``generated_ids`` are every token before ``position``; they are read only where
    ``params`` has a penalty that looks back. None counts those of the prompt: each once is enough, see
    `distinct`. Only ``allowed`` tokens are drawn, all if it is empty, and no ``banned`` one.
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


@dataclass(frozen=True, slots=True)
class SampleResult:
    """The result of a `SampleJob`. With an ``error``, no token is drawn, and ``sampled`` means nothing."""

    sampled: Sampled
    logits: Logits | None = None
    error: ConvoyError | None = None


@dataclass(frozen=True, slots=True)
class SampleTask:
    """Draws that are done; those that a device still works on have the same face (`gpu.drawing`)."""

    done: tuple[SampleResult, ...]

    def outcomes(self) -> tuple[SampleResult, ...]:
        """One for each draw, in their order."""
        return self.done


GREEDY = SampleJob(SamplingParams(temperature=0.0), choice=0, position=0)


def distinct(tokens: Sequence[int]) -> Sequence[int]:
    """Each of ``tokens`` once, ascending: made once for a prompt, it is cheap to draw with and to encode."""
    return array("I", sorted(set(tokens)))


def draw_all(logits: Logits, draws: Sequence[SampleJob]) -> tuple[SampleResult, ...]:
    """One outcome per row of ``logits``, [num_outputs, vocabulary]. Raises StepError for another number."""
    if len(logits) != len(draws):
        raise StepError(f"a step has {len(logits)} outputs and {len(draws)} draws")
    return tuple(draw(row, one) for row, one in zip(logits, draws, strict=True))


def draw(logits: Logits, one: SampleJob) -> SampleResult:
    """The outcome of one row, [vocabulary]. What cannot be drawn is that row's misfortune, not the step's."""
    try:
        sampled = _draw(logits, one)
    except ConvoyError as error:
        return SampleResult(Sampled(0), error=error)
    return SampleResult(sampled, logits.copy() if one.wants_logits else None)


def _draw(logits: Logits, one: SampleJob) -> Sampled:
    if one.score is not None:
        return prompt_logprob(logits, one.score, one.params.logprobs or 0)
    return sample(
        logits,
        one.params,
        choice=one.choice,
        position=one.position,
        prompt_ids=one.prompt_ids,
        generated_ids=one.generated_ids,
        allowed=one.allowed,
        banned=one.banned,
    )
