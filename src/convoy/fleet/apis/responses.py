"""Carry OpenAI's Responses API: its fields for an engine, its events, and what a relay adds."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from convoy.api.exchange import encode_event
from convoy.api.problem import ErrorBody, ErrorDetail
from convoy.api.refusals import UnknownResponse
from convoy.api.responses.items import SEND_ITEM, UNKNOWN_ITEM, is_reference
from convoy.api.responses.problem import error_of, failed_error
from convoy.api.responses.shapes import Event, ResponseError, ResponseObject
from convoy.config.type_resolution import resolved
from convoy.errors import RequestError
from convoy.fleet.answer import is_too_long
from convoy.fleet.apis.api import EventFacts, Fields
from convoy.fleet.apis.fields import Int, Short, Words, check_references, read_known


class AllowedPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """Hold a part of an item. Its other fields, such as addresses of images, are left out."""

    type: Short
    text: str | None = None
    refusal: str | None = None


class AllowedItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """Hold an item of the input. Of an unknown one the type alone is passed on."""

    type: Short | None = None
    id: Short | None = None
    role: Short | None = None
    status: Short | None = None
    content: str | list[AllowedPart] | None = None
    call_id: Short | None = None
    name: Short | None = None
    namespace: Short | None = None
    arguments: str | None = None
    output: str | list[AllowedPart] | None = None
    summary: list[AllowedPart] | None = None
    encrypted_content: str | None = None


class AllowedResponseTool(msgspec.Struct, frozen=True, omit_defaults=True):
    """Hold a function, or a namespace of functions. An engine may run tools of other types by itself."""

    type: Short
    name: Short | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: list[AllowedResponseTool] | None = None


class AllowedToolName(msgspec.Struct, frozen=True, omit_defaults=True):
    type: Short
    name: Short | None = None
    namespace: Short | None = None


class AllowedResponseChoice(AllowedToolName, frozen=True, omit_defaults=True):
    mode: Short | None = None
    tools: list[AllowedToolName] | None = None


class AllowedTextFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    type: Short
    name: Short | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class AllowedText(msgspec.Struct, frozen=True, omit_defaults=True):
    format: AllowedTextFormat | None = None


class AllowedReasoning(msgspec.Struct, frozen=True, omit_defaults=True):
    effort: Short | None = None
    summary: Short | None = None


# No server of this API refuses a field that it does not know, so all others are left out.
_KNOWN: Mapping[str, Any] = {
    "model": str,
    "input": str | list[AllowedItem],
    "instructions": str,
    "tools": list[AllowedResponseTool],
    "tool_choice": Literal["none", "auto", "required"] | AllowedResponseChoice,
    "parallel_tool_calls": bool,
    "text": AllowedText,
    "reasoning": AllowedReasoning,
    "include": Words,
    **dict.fromkeys(("max_output_tokens", "max_tool_calls", "seed"), Int),
    **dict.fromkeys(("temperature", "top_p", "presence_penalty", "frequency_penalty"), float),
    "truncation": Short,
    "stream": bool,
    "cache_salt": str,
}
_ENCODED_REASONING = "reasoning.encrypted_content"
_OWN_TOOLS = frozenset({"function", "namespace"})
_LAST_EVENTS = tuple(
    b"event: response." + state + b"\n" for state in (b"completed", b"incomplete", b"failed")
)
# Events whose ``delta`` adds text; each of them is about a token.
_ADDS = ".delta"


def check_response(body: Mapping[str, Any]) -> None:
    """Refuse a request that names texts that are kept elsewhere. Raises `RequestError`."""
    if body.get("previous_response_id") is not None:
        raise UnknownResponse(
            "a fleet stores no responses, so previous_response_id names none",
            param="previous_response_id",
            code="previous_response_not_found",
            hint="send the whole conversation as input",
        )
    items = body.get("input")
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, dict) and is_reference(item):
            param = f"input[{index}].id"
            raise UnknownResponse(
                f"a fleet stores no responses, so {param} names no item",
                param=param,
                code=UNKNOWN_ITEM,
                hint=SEND_ITEM,
            )
    for name in ("conversation", "prompt"):
        if body.get(name) is not None:
            raise RequestError(
                f"this server does not support {name}",
                param=name,
                code="unsupported_parameter",
                hint="send the whole conversation as input",
            )


def rebuild_response(given: Fields, stream: bool) -> dict[str, Any]:  # noqa: ARG001 - counts always come
    """Return the fields of a Responses request for an engine, which must not store the answer.

    Raises `RequestError`.
    """
    fields = read_known(given, _KNOWN)
    tools: list[AllowedResponseTool] = fields.pop("tools", [])
    own = [tool for tool in map(_own_tool, tools) if tool is not None]
    if own:
        fields["tools"] = own
    elif tools and fields.get("tool_choice") == "required":
        # Every tool was left out, so there is nothing that could be required.
        del fields["tool_choice"]
    text: AllowedText = fields.get("text", AllowedText())
    functions = [one for tool in own for one in (tool, *(tool.tools or ()))]
    check_references([("tools", one.parameters) for one in functions])
    check_references([("text", text.format.schema if text.format else None)])
    if _ENCODED_REASONING in fields.pop("include", ()):
        fields["include"] = [_ENCODED_REASONING]
    fields["store"] = False
    return fields


def _own_tool(tool: AllowedResponseTool) -> AllowedResponseTool | None:
    """Return a tool with its functions alone, or None for a tool that an engine would run."""
    if tool.type not in _OWN_TOOLS:
        return None
    if tool.tools is None:
        return tool
    members = [member for member in tool.tools if member.type == "function" and member.tools is None]
    return msgspec.structs.replace(tool, tools=members)


def read_response_event(found: Mapping[str, Any]) -> EventFacts:
    """Read an event or a whole response."""
    kind, item, given = found.get("type"), found.get("item"), found.get("response")
    response = given if isinstance(given, dict) else {}
    adds = isinstance(kind, str) and kind.endswith(_ADDS)
    # The text of an item comes in pieces; only the name of a call does not.
    begun = item.get("name") if kind == "response.output_item.added" and isinstance(item, dict) else None
    broken = response.get("error") if kind == "response.failed" else None
    if kind in ("error", "response.failed"):
        broken = broken or found
    return EventFacts(
        tokens=adds,
        usage=response.get("usage", found.get("usage")),
        texts=[found.get("delta") if adds else begun, *_texts_of(found.get("output"))],
        ended=kind in ("response.completed", "response.incomplete"),
        silent=kind == "response.in_progress",
        error=broken,
    )


def _texts_of(output: object) -> list[object]:
    items = output if isinstance(output, list) else []
    names = ("content", "summary", "name", "arguments")
    return [item.get(name) for item in items if isinstance(item, dict) for name in names]


class RelayedCreated(Event, frozen=True, tag="response.created"):
    """Begin a stream whose response is known as far as the engine or the relay wrote it."""

    response: dict[str, Any]


class RelayedFailed(Event, frozen=True, tag="response.failed"):
    """End such a stream after an error."""

    response: dict[str, Any]


class ResponseForm:
    """Implement `EventForm` for the Responses API.

    A stream that was silent before the engine's first event begins with a response of its own. The engine's
    events then get its id. All events are numbered here, because some are added and some left out.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._numbers = itertools.count()
        # The response as the last event showed it. Most values are the engine's own text.
        self._shown: dict[str, Any] = {}
        # The id of a response that began here; empty if it is the engine's.
        self._own_id = ""

    def pass_on(self, event: bytes) -> bytes:
        found = _fields_of(event)
        if found is None:
            return event + b"\n\n"
        kind = msgspec.json.decode(found["type"])
        if (given := found.get("response")) is not None:
            shown = msgspec.json.decode(given, type=dict[str, Any])
            if self._own_id:
                shown["id"] = self._own_id
                # The client knows the response already.
                kind = "response.in_progress" if kind == "response.created" else kind
            self._shown = shown
            found["response"] = msgspec.Raw(msgspec.json.encode(shown))
        return self._event(kind, found)

    def is_last(self, event: bytes) -> bool:
        return event.startswith(_LAST_EVENTS)

    def keep_alive(self) -> bytes:
        opening = b"".join(map(encode_event, self._opening()))
        return opening + self._event("response.in_progress", {"response": self._shown})

    def failure(self, error: BaseException) -> Sequence[msgspec.Struct]:
        return self._failed(error_of(error))

    def refused(self, status: int, body: bytes) -> bytes:
        try:
            detail = msgspec.json.decode(body, type=resolved(ErrorBody)).error
        except (msgspec.DecodeError, UnicodeDecodeError):
            detail = ErrorDetail("the engine refused the request", "server_error", None, None)
        return b"".join(map(encode_event, self._failed(failed_error(status, detail))))

    def streams(self, status: int, body: bytes) -> bool:
        """Return whether a refusal is a full context: Codex knows one only by the stream's event."""
        return status == 400 and is_too_long(body)

    def _opening(self) -> list[msgspec.Struct]:
        if self._shown:
            return []
        self._own_id = f"resp_{secrets.token_hex(12)}"
        own = ResponseObject(
            id=self._own_id,
            created_at=int(time.time()),
            model=self._model,
            text={"format": {"type": "text"}},
            temperature=1.0,
            top_p=1.0,
            metadata={},
        )
        self._shown = msgspec.to_builtins(own)
        return [RelayedCreated(response=self._shown, sequence_number=next(self._numbers))]

    def _failed(self, error: ResponseError) -> list[msgspec.Struct]:
        opening = self._opening()
        failed = {**self._shown, "status": "failed", "error": msgspec.to_builtins(error)}
        return [*opening, RelayedFailed(response=failed, sequence_number=next(self._numbers))]

    def _event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        data = {**fields, "type": kind, "sequence_number": next(self._numbers)}
        return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"


def _fields_of(event: bytes) -> Fields | None:
    """Return the fields of an event with a type, or None for any other one."""
    lines = [line[5:] for line in event.split(b"\n") if line.startswith(b"data:")]
    try:
        found = msgspec.json.decode(b"\n".join(lines), type=resolved(Fields))
        kind = msgspec.json.decode(found["type"])
        msgspec.json.decode(found.get("response", b"{}"), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError):
        return None
    return found if isinstance(kind, str) and kind.isascii() and kind.isprintable() else None
