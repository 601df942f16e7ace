"""Parse bodies and streams of the Responses API by the `openai` package's own types, strictly."""

from __future__ import annotations

import json
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent

from support.strict_types import parse_strictly


def parse_response_stream(text: str) -> list[dict[str, Any]]:
    """Return the events of a whole stream.

    Raises or asserts if one has another form, or if their numbers do not count from 0.
    """
    events: list[dict[str, Any]] = []
    for part in text.split("\n\n"):
        # A coordinator and a proxy add comments.
        if part and not part.startswith(":") and part != "data: [DONE]":
            first, second = part.split("\n")
            data = second.removeprefix("data: ")
            event: dict[str, Any] = json.loads(data)
            assert event["type"] == first.removeprefix("event: ")
            # Clients know this code from the server, and the package's type lacks it.
            known = data.replace('"code":"context_length_exceeded"', '"code":"server_error"')
            parse_strictly(ResponseStreamEvent, known)
            events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def parse_response(text: str) -> Response:
    """Return a whole answer."""
    response: Response = parse_strictly(Response, text)
    return response
