"""Write an answer's count of tokens in OpenAI's form. Both kinds of answers do, so it stands apart."""

from __future__ import annotations

import msgspec

from convoy.api.chat.usage import UsageCounter
from convoy.api.openai.answers import PromptTokensDetails, TokenUsage

# The end of a complete stream.
DONE = b"data: [DONE]\n\n"


def usage_of(counter: UsageCounter) -> TokenUsage:
    """Return the tokens that are counted so far."""
    prompt = counter.asked.num_prompt_tokens
    details = PromptTokensDetails(counter.cached_tokens)
    return TokenUsage(prompt, counter.completion_tokens, prompt + counter.completion_tokens, details)


def event_usage_of(counter: UsageCounter) -> TokenUsage | msgspec.UnsetType | None:
    """Return a chunk's ``usage``: the count so far, null if a usage event will come, or absent."""
    if counter.asked.continuous_usage:
        return usage_of(counter)
    return None if counter.asked.include_usage else msgspec.UNSET
