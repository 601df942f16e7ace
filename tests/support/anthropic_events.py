"""Parse bodies and streams of the Messages API by the `anthropic` package's own types, strictly."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from support.strict_types import parse_strictly

# Every test process imports this file. The package takes seconds, and few tests need it.
if TYPE_CHECKING:
    from anthropic.types import Message

# The package's own client reads these two without a type.
UNTYPED = ("ping", "error")


def parse_event(name: str, data: str) -> dict[str, Any]:
    """Return an event's data. Its name must be its type, and its fields those of the package's type."""
    from anthropic.types import RawMessageStreamEvent

    event: dict[str, Any] = json.loads(data)
    assert event["type"] == name
    if name not in UNTYPED:
        _refuse_extra(parse_strictly(RawMessageStreamEvent, data))
    return event


def parse_stream(text: str) -> list[dict[str, Any]]:
    """Return the events of a whole stream. Raises or asserts where one has another form."""
    events = []
    for part in text.split("\n\n"):
        # A coordinator and a proxy add comments.
        if part and not part.startswith(":"):
            first, second = part.split("\n")
            events.append(parse_event(first.removeprefix("event: "), second.removeprefix("data: ")))
    return events


def parse_message(text: str) -> Message:
    """Return a whole answer."""
    from anthropic.types import Message

    message = Message.model_validate_json(text, strict=True)
    _refuse_extra(message)
    return message


def _refuse_extra(value: object) -> None:
    match value:
        case BaseModel():
            assert not value.model_extra, f"{type(value).__name__} has {sorted(value.model_extra)} too"
            for name in type(value).model_fields:
                _refuse_extra(getattr(value, name))
        case list():
            for item in value:
                _refuse_extra(item)


def blocks_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the content blocks that a stream's events build, as a client assembles them.

    Asserts the order of the events: one message, and blocks that never interleave.
    """
    told = [event for event in events if event["type"] != "ping"]
    assert [event["type"] for event in (told[0], *told[-2:])] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in told[1:-2]:
        kind = event["type"]
        if kind == "content_block_start":
            assert not is_open
            is_open = True
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
            continue
        assert is_open
        assert event["index"] == len(blocks) - 1
        if kind == "content_block_stop":
            is_open = False
        else:
            _add(blocks[-1], event["delta"])
    assert not is_open
    return blocks


def _add(block: dict[str, Any], delta: dict[str, str]) -> None:
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "signature_delta":
            block["signature"] += delta["signature"]
        case "input_json_delta":
            block["json"] += delta["partial_json"]
        case other:
            raise AssertionError(other)
