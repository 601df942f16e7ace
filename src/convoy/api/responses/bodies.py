"""Define and decode the body of POST /v1/responses. Fields that it does not name are ignored."""

from __future__ import annotations

from typing import Any

import msgspec

from convoy.api.openai.bodies import convert_object, decode_object


class ReasoningOptions(msgspec.Struct, frozen=True):
    """Hold how much the model reasons, and whether its reasoning comes as a summary."""

    effort: str | None = None
    summary: str | None = None


class TextFormat(msgspec.Struct, frozen=True):
    """Hold the form of the answer's text."""

    type: str
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True):
    """Hold the options of the answer's text."""

    format: TextFormat | None = None


class ResponsesBody(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the body. None always means: not given. Items, tools and choices are read by hand."""

    model: str | None = None
    input: str | list[Any]
    instructions: str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # A field of this server, so that two answers can be the same.
    seed: int | None = None
    truncation: str | None = None
    include: list[Any] | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    # These two name texts that are kept elsewhere. Without them the model would read another conversation.
    conversation: Any = None
    prompt: Any = None


def decode_responses(data: bytes) -> ResponsesBody:
    """Return the body that JSON bytes hold. Raises `RequestError` naming the field at fault."""
    return convert_object(decode_object(data), ResponsesBody)
