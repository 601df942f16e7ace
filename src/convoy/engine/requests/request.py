"""What a client asks of the engine: token ids in, nothing about HTTP or text encoding."""

from __future__ import annotations

from dataclasses import dataclass, field

from convoy.model.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and how to go on from it.

    ``num_choices`` independent continuations share the prompt; choice *i* draws with (seed, i, position).
    ``prompt_logprobs`` asks for the log-probability of each prompt token after the first, with that many
    alternatives. Requests share the K/V of a common prefix only where their ``cache_salt`` is the same.
    ``open_ended``: nobody asked for ``max_tokens``; they are what there was room for, and fewer will do.

    ``stop_token_ids`` end the answer as an end-of-text token does, and are not shown. Neither can be drawn
    before ``min_tokens`` tokens, and no stop string counts before. ``allowed_token_ids``: no other token is
    drawn; empty: all may be. ``bad_words``: of each sequence, the last token is not drawn after the others.
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    num_choices: int = 1
    prompt_logprobs: int | None = None
    cache_salt: bytes = field(default=b"", repr=False)
    open_ended: bool = False
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
