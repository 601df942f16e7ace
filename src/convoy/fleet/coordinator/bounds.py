"""What a provider may bill at most: no more of a prompt than was sent, no more of an answer than was seen."""

from __future__ import annotations

from dataclasses import dataclass

from convoy.fleet.answer import is_too_long
from convoy.fleet.asked import Wanted, refused_prompt_tokens

_FREE_TOKENS = 64  # that show no text: ends of turns, tokens that are parts of a character


@dataclass(frozen=True, slots=True)
class BilledOutcome:
    """What an answer came to, as its provider says, or as it is billed."""

    prompt_tokens: int
    completion_tokens: int

    def bounded(self, most: BilledOutcome) -> BilledOutcome:
        """Return this, but no more than ``most`` of each."""
        return BilledOutcome(
            min(self.prompt_tokens, most.prompt_tokens), min(self.completion_tokens, most.completion_tokens)
        )


def most_billed(
    wanted: Wanted, *, template_tokens: int, text_bytes: int, refusal: bytes | None
) -> BilledOutcome:
    """Return the bounds for one answer.

    ``template_tokens``: of the provider's offer. ``text_bytes``: that passed, or that may have passed where
    they are sealed. ``refusal``: the body that passed, where it is no answer; None for an answer.
    """
    prompt = min(wanted.most_prompt_tokens, wanted.body_bytes + template_tokens)
    if refusal is not None:
        if not is_too_long(refusal):
            return BilledOutcome(0, 0)
        return BilledOutcome(min(prompt, refused_prompt_tokens(wanted.prompt_tokens)), 0)
    return BilledOutcome(prompt, min(wanted.max_tokens, text_bytes + text_bytes // 4 + _FREE_TOKENS))
