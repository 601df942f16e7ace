"""The tokens that a request lets the sampler choose: `min_tokens`, `allowed_token_ids` and `bad_words`.

The head works out the ids for each token and sends them with the sampling job, so that the owner of the
output needs no state of the request. The rules are vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as SetOf
from dataclasses import dataclass

from convoy.engine.requests.request import GenerationRequest
from convoy.errors import RequestError
from convoy.model.sampling.params import MAX_BANNED_IDS, MAX_TOKEN_IDS


@dataclass(frozen=True, slots=True)
class Restrictions:
    """Hold the rules of one request. The object is false if every token is allowed at any time."""

    min_tokens: int
    # End-of-text tokens of the model, and the request's own.
    ends: frozenset[int]
    # Ascending; empty allows all.
    allowed: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...]
    # Generated tokens that a bad word looks back on.
    reach: int

    @classmethod
    def of(cls, request: GenerationRequest, eos_ids: SetOf[int]) -> Restrictions:
        """Return the rules of ``request`` for a model with these end-of-text tokens."""
        return cls(
            request.min_tokens,
            request.stop_token_ids | eos_ids,
            tuple(sorted(set(request.allowed_token_ids))),
            request.bad_words,
            max((len(word) - 1 for word in request.bad_words), default=0),
        )

    def __bool__(self) -> bool:
        return bool(self.min_tokens or self.allowed or self.bad_words)

    def next(self, num_generated: int, past: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the allowed and the banned ids of the token after ``num_generated``; one of them is empty.

        ``past`` ends with the generated tokens before it, at least `reach` of them if there are as many.
        """
        banned = set(self.ends) if num_generated < self.min_tokens else set()
        for *prefix, last in self.bad_words:
            if not prefix or list(past[-len(prefix) :]) == prefix:
                banned.add(last)
        if not self.allowed:
            return (), tuple(sorted(banned))
        return tuple(token for token in self.allowed if token not in banned), ()

    @property
    def most_banned(self) -> frozenset[int]:
        """Return all ids that can be banned at once."""
        ends = self.ends if self.min_tokens else frozenset()
        return ends | {word[-1] for word in self.bad_words}


def leaves_a_token(mask: bytes, allowed: Sequence[int], banned: Sequence[int]) -> bool:
    """Return whether a grammar's ``mask`` and the ids of `Restrictions.next` have a token in common."""
    if allowed:
        return any(_has(mask, token) for token in allowed)
    num_banned = sum(_has(mask, token) for token in set(banned))
    return int.from_bytes(mask, "little").bit_count() > num_banned


def _has(mask: bytes, token: int) -> int:
    return mask[token // 8] >> token % 8 & 1


def check_ids(request: GenerationRequest, eos_ids: SetOf[int], vocab_size: int) -> None:
    """Raise `RequestError` for an empty prompt, ids outside the vocabulary, and as `check_restrictions`."""
    prompt = request.prompt_ids
    if not prompt:
        raise RequestError("the prompt is empty, expected at least one token", param="prompt")
    if max(prompt) >= vocab_size or min(prompt) < 0:
        raise RequestError(f"a prompt token is outside the vocabulary of {vocab_size}", param="prompt")
    request.params.check_vocabulary(vocab_size)
    check_restrictions(request, eos_ids, vocab_size)


def check_restrictions(request: GenerationRequest, eos_ids: SetOf[int], vocab_size: int) -> None:
    """Raise `RequestError` for ids outside the vocabulary, too many ids, and rules that leave no token."""
    listed = {"stop_token_ids": request.stop_token_ids, "allowed_token_ids": request.allowed_token_ids}
    for name, ids in listed.items():
        if len(ids) > MAX_TOKEN_IDS:
            raise RequestError(f"{name} has {len(ids)} ids, and the limit is {MAX_TOKEN_IDS}", param=name)
    for name, ids in {**listed, "bad_words": [i for word in request.bad_words for i in word]}.items():
        # The text does not name the id, because errors reveal nothing of a prompt.
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            text = f"{name} names a token outside the vocabulary, expected ids below {vocab_size}"
            raise RequestError(text, param=name)
    if not 0 <= request.min_tokens <= request.max_tokens:
        text = f"min_tokens is {request.min_tokens}, expected 0 to {request.max_tokens}, which is max_tokens"
        raise RequestError(text, param="min_tokens")
    _check_some_are_left(Restrictions.of(request, eos_ids), vocab_size)


def _check_some_are_left(rules: Restrictions, vocab_size: int) -> None:
    # Checked for the largest ban, so that the sampler always has a token left, at any point of the text.
    banned = rules.most_banned
    name = "bad_words" if rules.bad_words else "min_tokens"
    if len(banned) > MAX_BANNED_IDS:
        text = f"{name}: {len(banned)} tokens may be banned at once, and the limit is {MAX_BANNED_IDS}"
        raise RequestError(text, param=name)
    left = len(set(rules.allowed) - banned) if rules.allowed else vocab_size - len(banned)
    if left < 1:
        text = f"{name} may ban each of the {len(rules.allowed) or vocab_size} tokens that are allowed"
        raise RequestError(f"{text}, expected at least 1 that stays", param=name)
