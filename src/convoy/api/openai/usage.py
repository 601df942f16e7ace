"""Write an answer's count of tokens in OpenAI's form. Both kinds of answers do, so it stands apart."""

from __future__ import annotations

import msgspec

from convoy.api.chat.usage import UsageCounter
from convoy.api.openai.answers import PromptTokensDetails, TokenUsage

# The end of a complete stream.
DONE = b"data: [DONE]\n\n"


def usage_of(tally: UsageCounter) -> TokenUsage:
    """Return the tokens that are counted so far."""
    prompt = tally.asked.num_prompt_tokens
    details = PromptTokensDetails(tally.cached_tokens)
    return TokenUsage(prompt, tally.completion_tokens, prompt + tally.completion_tokens, details)


def event_usage_of(tally: UsageCounter) -> TokenUsage | msgspec.UnsetType | None:
    """Return a chunk's ``usage``: the count so far, null if a usage event will come, or absent."""
    if tally.asked.continuous_usage:
        return usage_of(tally)
    return None if tally.asked.include_usage else msgspec.UNSET
