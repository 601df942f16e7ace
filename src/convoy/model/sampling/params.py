"""Define how a request's tokens are sampled.

The module does not import torch, because the engine's scheduling side and `api` read it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from convoy.errors import RequestError

MAX_LOGPROBS = 20
# entries of a logit_bias
MAX_LOGIT_BIAS = 1024
# ids in stop_token_ids, and in allowed_token_ids
MAX_TOKEN_IDS = 1024
# banned ids in one sample
MAX_BANNED_IDS = 1024


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Hold checked parameters. A RequestError names OpenAI's parameter, the value and the allowed range.

    ``seed``, the choice's index and the token's position fix the token's random number (see
    `sampling.sample`). ``logprobs`` is the number of alternatives to report beside the chosen token; None
    reports nothing.
    """

    # 0 means greedy
    temperature: float = 1.0
    # 0 or -1 means all tokens
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, 2.0)
        _check_integer("top_k", self.top_k, -1, 2**31 - 1)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_logit_bias(self.logit_bias)
        # copy it: a caller's dict could change while the request runs
        object.__setattr__(self, "logit_bias", MappingProxyType(dict(self.logit_bias)))

    @property
    def greedy(self) -> bool:
        """Tell whether sampling uses no random number."""
        return self.temperature == 0

    @property
    def reshapes(self) -> bool:
        """Tell whether logits are changed before the choice, greedy or not."""
        return (
            self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        ) or bool(self.logit_bias)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise RequestError if a biased token is not among the model's ``vocab_size``."""
        if self.logit_bias and max(self.logit_bias) >= vocab_size:
            raise RequestError(
                f"logit_bias names a token outside the vocabulary, expected ids below {vocab_size}",
                param="logit_bias",
            )


def _check_number(name: str, value: object, least: float, most: float) -> None:
    # compare without converting: an integer may be too large for a float
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise RequestError(f"{name} is {value!r}, expected a number from {least:g} to {most:g}", param=name)


def _check_integer(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise RequestError(f"{name} is {value!r}, expected a whole number from {least} to {most}", param=name)


def _check_logit_bias(bias: object) -> None:
    # token ids are private to the prompt: errors name the parameter and the rule, not the entry
    if not isinstance(bias, Mapping):
        raise RequestError("logit_bias is not an object of token ids and numbers", param="logit_bias")
    if len(bias) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias has {len(bias)} entries, expected at most {MAX_LOGIT_BIAS}", param="logit_bias"
        )
    for token_id, value in bias.items():
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise RequestError("logit_bias has a key that is not a token id", param="logit_bias")
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise RequestError("logit_bias has a value outside -100 to 100", param="logit_bias")
