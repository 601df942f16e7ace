"""Parse streams of chat completions by the `openai` package's own types, strictly."""

from __future__ import annotations

import json
from typing import Any

from openai.types.chat import ChatCompletionChunk

from support.strict_types import parse_strictly


def parse_chat_stream(text: str) -> list[dict[str, Any]]:
    """Return the chunks of a whole stream, and the error that ends one. Raises for another form."""
    found: list[dict[str, Any]] = []
    for part in text.split("\n\n"):
        # A coordinator and a proxy add comments.
        if part and not part.startswith(":") and part != "data: [DONE]":
            data = part.removeprefix("data: ")
            chunk: dict[str, Any] = json.loads(data)
            if "error" not in chunk:
                parse_strictly(ChatCompletionChunk, data)
            found.append(chunk)
    return found
