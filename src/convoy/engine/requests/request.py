"""A client's request to the engine: token ids in, without HTTP or text encoding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from convoy.model.constraints.matcher import Matcher
from convoy.model.sampling.params import SamplingParams


class AnswerGrammar(Protocol):
    """Declare the part of `CompiledGrammar` that an engine needs."""

    def matcher(self) -> Matcher:
        """Return a new matcher, at the start of an answer."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Hold one prompt and the rules of its continuation.

    ``num_choices`` independent continuations share the prompt; choice *i* samples with (seed, i, position).
    ``prompt_logprobs`` asks for the log-probability of each prompt token after the first, with that many
    alternatives. Requests share the K/V of a common prefix only if they have the same ``cache_salt``. With
    ``open_ended``, the client set no ``max_tokens``: the value is the room that there was, and may shrink.

    ``stop_token_ids`` end the answer as an end-of-text token does, and are not shown. Neither kind can be
    sampled before ``min_tokens`` tokens, and no stop string counts before. If ``allowed_token_ids`` is not
    empty, no other token is sampled. Of each sequence in ``bad_words``, the last token is not sampled after
    the others. With a ``grammar`` each answer matches it. An answer that ends with "length" is the beginning
    of one that does. An answer that nothing can continue ends. A request that ``embeds`` samples nothing: its
    only output is the final state of the prompt's last token, and ``max_tokens`` is 0. With
    ``tells_prefill`` each chunk of the prompt is reported. Without ``tells_text`` a request that has no stop
    strings gets tokens without their text, for a caller that spells them itself.
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
    grammar: AnswerGrammar | None = field(default=None, repr=False)
    embeds: bool = False
    tells_prefill: bool = False
    tells_text: bool = True
