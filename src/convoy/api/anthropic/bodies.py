"""Define and decode the body of a Messages request. Fields that it does not name are ignored."""

from __future__ import annotations

from typing import Any

import msgspec

from convoy.api.openai.bodies import convert_object, decode_object


class InputMessage(msgspec.Struct, frozen=True):
    """Hold one message. Its content is text, or a list of blocks, whose forms `history` checks."""

    role: str
    content: str | list[dict[str, Any]]


class MessageTool(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a tool. The client runs one without a type, or of type custom; ``input_schema`` is its own."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class MessageToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the choice among the tools: auto, any, tool with a name, or none."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True):
    """Hold whether the model thinks: enabled, adaptive or disabled. A budget is ignored."""

    type: str


class AnswerFormat(msgspec.Struct, frozen=True):
    """Hold the form of the answer's text: a JSON schema."""

    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, frozen=True):
    """Hold how much effort the model makes, and the form of its answer."""

    effort: str | None = None
    format: AnswerFormat | None = None


class PromptBody(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the fields that make a prompt: the body of POST /v1/messages/count_tokens."""

    messages: list[InputMessage]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesBody(PromptBody, frozen=True, kw_only=True):
    """Hold the body of POST /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


def decode_messages(data: bytes) -> MessagesBody:
    """Return the body of POST /v1/messages. Raises `RequestError`."""
    return convert_object(decode_object(data), MessagesBody)


def decode_prompt(data: bytes) -> PromptBody:
    """Return the body of POST /v1/messages/count_tokens. Raises `RequestError`."""
    return convert_object(decode_object(data), PromptBody)
