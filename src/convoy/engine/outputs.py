"""What the engine says back, in order, for each request.

Per choice: any number of `TokenOutput`, then exactly one `FinishOutput`. A `PromptOutput` comes before the
first token where prompt log-probabilities were asked for. An `ErrorOutput` ends the whole request, at any
point, and nothing follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from convoy.errors import ConvoyError

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token under the raw distribution, and the best alternatives, best first.

    ``rank`` is a prompt token's place among all tokens, from 1; 0 for a token that was drawn.
    """

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One shown token. ``text`` may be empty: half a character, or the start of what may be a stop string."""

    choice: int
    token_id: int
    text: str
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class PromptOutput:
    """One entry per prompt token; the first has no log-probability."""

    logprobs: Sequence[TokenLogprob | None]


@dataclass(frozen=True, slots=True)
class FinishOutput:
    """The choice is complete.

    ``text`` is what was held back until now; an end-of-text token is never shown. ``cached_tokens`` of the
    prompt were not run again, because an earlier request of the same prefix had. ``queued_s``: how long it
    waited until a step carried it; no part of what it says.
    """

    choice: int
    reason: FinishReason
    text: str = ""
    cached_tokens: int = 0
    queued_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class ErrorOutput:
    """The request ended before it was complete."""

    error: ConvoyError


Output = TokenOutput | PromptOutput | FinishOutput | ErrorOutput
