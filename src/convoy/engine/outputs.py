"""The engine's outputs for each request, in order.

Each choice gets any number of `TokenOutput`, then exactly one `FinishOutput`. A `PromptOutput` comes before
the first token if prompt log-probabilities were asked for, and a `PrefillOutput` for each chunk of the
prompt but the last if that was asked for. A request for an embedding gets one
`EmbeddingOutput` in place of tokens. An `ErrorOutput` ends the whole request, at any
point, and nothing follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from convoy.errors import ConvoyError

if TYPE_CHECKING:
    # A proxy reads outputs' types and starts without numpy.
    import numpy as np
    import numpy.typing as npt

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Hold a token's log-probability under the raw distribution and the best alternatives, best first.

    ``rank`` is a prompt token's place among all tokens, from 1; it is 0 for a sampled token.
    """

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """Hold one shown token.

    ``text`` may be empty, for half a character or the possible start of a stop string.
    """

    choice: int
    token_id: int
    text: str
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class PromptOutput:
    """Hold one entry for each prompt token; the first has no log-probability."""

    logprobs: Sequence[TokenLogprob | None]


@dataclass(frozen=True, slots=True)
class PrefillOutput:
    """Report how many tokens of the request's own prompt have run, or were cached, of how many."""

    num_done: int
    num_cached: int
    num_prompt: int


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingOutput:
    """Hold the state of the prompt's last token behind the final norm, float32 [output_size]."""

    state: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class FinishOutput:
    """Report that the choice is complete.

    ``text`` is the text held back until now; an end-of-text token is never shown. ``cached_tokens`` of the
    prompt were not run again, because an earlier request with the same prefix had run them. ``queued_s`` is
    the wait until a step carried the choice, in seconds; comparisons ignore it.
    """

    choice: int
    reason: FinishReason
    text: str = ""
    cached_tokens: int = 0
    queued_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class ErrorOutput:
    """Report that the request ended before it was complete."""

    error: ConvoyError


Output = TokenOutput | PromptOutput | PrefillOutput | EmbeddingOutput | FinishOutput | ErrorOutput
