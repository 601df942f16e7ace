"""Carry Anthropic's Messages API: its fields for an engine, its events, and what a relay adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from convoy.api.anthropic.problem import problem_of
from convoy.api.anthropic.shapes import MessageError, MessageErrorBody, PingEvent
from convoy.api.exchange import encode_event
from convoy.config.type_resolution import resolved
from convoy.fleet.apis.api import EventFacts, Fields
from convoy.fleet.apis.fields import Int, Short, Words, check_references, read_known


class AllowedBlock(msgspec.Struct, frozen=True, omit_defaults=True):
    """Hold a block of a Messages request. Its other fields, such as sources of images, are left out."""

    type: Short
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: Short | None = None
    name: Short | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Short | None = None
    content: str | list[AllowedBlock] | None = None
    is_error: bool | None = None


class AllowedTurn(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[AllowedBlock]


class AllowedMessageTool(msgspec.Struct, frozen=True, omit_defaults=True):
    """Hold a tool. Only those that the client runs are passed on: an engine may run the others."""

    type: Short | None = None
    name: Short | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class AllowedMessageChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    type: Literal["auto", "any", "tool", "none"]
    name: Short | None = None
    disable_parallel_tool_use: bool | None = None


class AllowedThinking(msgspec.Struct, frozen=True, omit_defaults=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Int | None = None


class AllowedForm(msgspec.Struct, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class AllowedOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    effort: Short | None = None
    format: AllowedForm | None = None


# No server of this API refuses a field that it does not know, so all others are left out.
_PROMPT: Mapping[str, Any] = {
    "model": str,
    "messages": list[AllowedTurn],
    "system": str | list[AllowedBlock],
    "tools": list[AllowedMessageTool],
    "tool_choice": AllowedMessageChoice,
    "thinking": AllowedThinking,
    "output_config": AllowedOutput,
}
_WHOLE: Mapping[str, Any] = {
    **_PROMPT,
    "max_tokens": Int,
    "stream": bool,
    "stop_sequences": Words,
    "temperature": float,
    "top_p": float,
    "top_k": Int,
    "cache_salt": str,
}


def rebuild_message(given: Fields, stream: bool) -> dict[str, Any]:  # noqa: ARG001 - counts always come
    """Return the fields of a Messages request for an engine. Raises `RequestError`."""
    return _rebuild(given, _WHOLE)


def rebuild_prompt(given: Fields, stream: bool) -> dict[str, Any]:  # noqa: ARG001 - it is never streamed
    """Return the fields of a prompt whose tokens are to be counted. Raises `RequestError`."""
    return _rebuild(given, _PROMPT)


def _rebuild(given: Fields, known: Mapping[str, Any]) -> dict[str, Any]:
    fields = read_known(given, known)
    tools = fields.pop("tools", ())
    own = [tool for tool in tools if tool.type in (None, "custom")]
    if own:
        fields["tools"] = own
    if tools and _demands_nothing(fields.get("tool_choice"), own, tools):
        del fields["tool_choice"]
    output: AllowedOutput = fields.get("output_config", AllowedOutput())
    schemas: list[tuple[str, Any]] = [("tools", tool.input_schema) for tool in own]
    check_references([*schemas, ("output_config", output.format.schema if output.format else None)])
    return fields


def _demands_nothing(
    choice: AllowedMessageChoice | None,
    own: Sequence[AllowedMessageTool],
    given: Sequence[AllowedMessageTool],
) -> bool:
    """Return whether a choice demands a call of tools that were all left out, so that nothing is required."""
    if choice is None:
        return False
    if choice.type == "any":
        return not own
    left_out = {tool.name for tool in given if tool.name} - {tool.name for tool in own}
    return choice.type == "tool" and choice.name in left_out


def read_message(found: Mapping[str, Any]) -> EventFacts:
    """Read an event or a whole message."""
    kind, message, delta = found.get("type"), found.get("message"), found.get("delta")
    start = message if kind == "message_start" and isinstance(message, dict) else {}
    signs = isinstance(delta, dict) and delta.get("type") == "signature_delta"
    return EventFacts(
        tokens=kind == "content_block_delta" and not signs,
        usage=start.get("usage", found.get("usage")),
        texts=[found.get(name) for name in ("delta", "content_block", "content")],
        ended=kind == "message_stop",
        silent=kind == "ping",
        error=found.get("error"),
    )


class MessageForm:
    """Implement `EventForm` for the Messages API."""

    def __init__(self, model: str) -> None:
        """Make the form. No event that is added names the ``model``."""

    def pass_on(self, event: bytes) -> bytes:
        return event + b"\n\n"

    def is_last(self, event: bytes) -> bool:
        return event.startswith(b"event: message_stop\n")

    def keep_alive(self) -> bytes:
        return encode_event(PingEvent())

    def failure(self, error: BaseException) -> Sequence[msgspec.Struct]:
        return [problem_of(error)]

    def refused(self, status: int, body: bytes) -> bytes:  # noqa: ARG002 - a stream has one form of errors
        try:
            return encode_event(msgspec.json.decode(body, type=resolved(MessageErrorBody)))
        except (msgspec.DecodeError, UnicodeDecodeError):
            text = "the engine refused the request"
            return encode_event(MessageErrorBody(MessageError("api_error", text)))

    def streams(self, status: int, body: bytes) -> bool:  # noqa: ARG002 - a refusal keeps its status
        return False
