"""Write the parts that chunks and answers of chat and of completions share: ids, and the count of tokens."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from convoy.api.chat.usage import UsageCounter
from convoy.api.openai.answers import (
    ChatChunk,
    ChatCompletion,
    PromptProgress,
    PromptTokensDetails,
    TextCompletion,
    TokenUsage,
)

Body = TypeVar("Body", ChatChunk, ChatCompletion, TextCompletion)

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


def chunk_of(kind: type[Body], counter: UsageCounter, choice: Any) -> Body:
    """Return a stream's event of one choice."""
    return _body(kind, counter, [choice], event_usage_of(counter))


def progress_of(kind: type[Body], counter: UsageCounter, progress: PromptProgress) -> Body:
    """Return a stream's event while its prompt runs."""
    return _body(kind, counter, [], event_usage_of(counter), prompt_progress=progress)


def whole_of(kind: type[Body], counter: UsageCounter, choices: list[Any], **more: Any) -> Body:
    """Return a whole answer. ``more`` are further fields of it."""
    return _body(kind, counter, choices, usage_of(counter), **more)


def closing_of(kind: type[Body], counter: UsageCounter) -> list[Body]:
    """Return the event with the usage alone, if it was asked for."""
    return [whole_of(kind, counter, [])] if counter.asked.include_usage else []


def _body(kind: type[Body], counter: UsageCounter, choices: list[Any], usage: Any, **more: Any) -> Body:
    model = counter.asked.model.name
    return kind(id=counter.id, created=counter.created, model=model, choices=choices, usage=usage, **more)
