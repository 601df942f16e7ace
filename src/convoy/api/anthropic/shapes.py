"""Define the bodies and stream events, in Anthropic's form. The tag of an event is its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class MessageUsage(msgspec.Struct, frozen=True):
    """Count the prompt's tokens, those that were run and those that were cached, and the answer's."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0


class TextBlock(msgspec.Struct, frozen=True, tag="text", tag_field="type"):
    """Hold text for the user."""

    text: str
    citations: None = None


class ThinkingBlock(msgspec.Struct, frozen=True, tag="thinking", tag_field="type"):
    """Hold the model's reasoning, and a mark that a client sends back with it."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, frozen=True, tag="tool_use", tag_field="type"):
    """Hold a call. ``input`` is empty at the start of a stream's block."""

    id: str
    name: str
    input: Mapping[str, Any] | msgspec.Raw


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageBody(msgspec.Struct, frozen=True, tag="message", tag_field="type"):
    """Hold an answer: complete, or as it is at the start of a stream."""

    id: str
    model: str
    content: Sequence[Block]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    role: str = "assistant"


class MessageStart(msgspec.Struct, frozen=True, tag="message_start", tag_field="type"):
    """Begin a stream."""

    message: MessageBody


class PingEvent(msgspec.Struct, frozen=True, tag="ping", tag_field="type"):
    """Keep a silent stream alive."""


class BlockStart(msgspec.Struct, frozen=True, tag="content_block_start", tag_field="type"):
    """Begin a block."""

    index: int
    content_block: Block


class TextDelta(msgspec.Struct, frozen=True, tag="text_delta", tag_field="type"):
    """Add to a text."""

    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag="thinking_delta", tag_field="type"):
    """Add to a reasoning."""

    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag="signature_delta", tag_field="type"):
    """Complete a reasoning."""

    signature: str


class InputJsonDelta(msgspec.Struct, frozen=True, tag="input_json_delta", tag_field="type"):
    """Add to the JSON text of a call's input."""

    partial_json: str


class BlockDelta(msgspec.Struct, frozen=True, tag="content_block_delta", tag_field="type"):
    """Add to a block."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockStop(msgspec.Struct, frozen=True, tag="content_block_stop", tag_field="type"):
    """End a block."""

    index: int


class Stopped(msgspec.Struct, frozen=True):
    """Tell why an answer ended, and which stop sequence matched."""

    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, tag="message_delta", tag_field="type"):
    """Tell how an answer ended, and all of its tokens."""

    delta: Stopped
    usage: MessageUsage


class MessageStop(msgspec.Struct, frozen=True, tag="message_stop", tag_field="type"):
    """End a complete stream."""


class TokenCount(msgspec.Struct, frozen=True):
    """Hold the answer of POST /v1/messages/count_tokens."""

    input_tokens: int


class MessageError(msgspec.Struct, frozen=True):
    """Hold the kind of an error and its text."""

    type: str
    message: str


class MessageErrorBody(msgspec.Struct, frozen=True, tag="error", tag_field="type"):
    """Hold the body of every answer that is not 2xx. A broken stream ends with it too."""

    error: MessageError


class ModelInfo(msgspec.Struct, frozen=True, tag="model", tag_field="type"):
    """Describe a model. ``created_at`` is a time after RFC 3339."""

    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int
    lifecycle: str = "active"


class ModelPage(msgspec.Struct, frozen=True):
    """Hold the answer of GET /v1/models: all models on one page."""

    data: Sequence[ModelInfo]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


def page_of(models: Sequence[ModelInfo]) -> ModelPage:
    """Return all models as one page."""
    return ModelPage(models, *((models[0].id, models[-1].id) if models else (None, None)))
