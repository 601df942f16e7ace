"""Limit the tokens that a provider may bill: the prompt to the bytes sent, the answer to the text seen."""

from __future__ import annotations

from dataclasses import dataclass

from convoy.fleet.answer import is_too_long
from convoy.fleet.apis.table import APIS
from convoy.fleet.consumer_request import ConsumerRequest, refused_prompt_tokens

# Tokens that show no text: ends of turns, and tokens that are parts of a character.
_FREE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class BilledOutcome:
    """Count the tokens of an answer, as its provider reports them or as they are billed."""

    prompt_tokens: int
    completion_tokens: int

    def bounded(self, most: BilledOutcome) -> BilledOutcome:
        """Return this outcome with each count limited to that of ``most``."""
        return BilledOutcome(
            min(self.prompt_tokens, most.prompt_tokens), min(self.completion_tokens, most.completion_tokens)
        )


def most_billed(
    wanted: ConsumerRequest, *, template_tokens: int, text_bytes: int, refusal: bytes | None
) -> BilledOutcome:
    """Return the largest outcome that may be billed for one answer.

    ``template_tokens`` is the provider's offer. ``text_bytes`` counts the text that passed; for sealed
    answers it is the most that may have passed. ``refusal`` is the body of a refusal, or None for an answer.
    """
    prompt = min(wanted.most_prompt_tokens, wanted.body_bytes + template_tokens)
    if refusal is not None:
        if not is_too_long(refusal):
            return BilledOutcome(0, 0)
        return BilledOutcome(min(prompt, refused_prompt_tokens(wanted.prompt_tokens)), 0)
    if not APIS[wanted.kind].generates:
        return BilledOutcome(refused_prompt_tokens(prompt), 0)
    return BilledOutcome(prompt, min(wanted.max_tokens, text_bytes + text_bytes // 4 + _FREE_TOKENS))
