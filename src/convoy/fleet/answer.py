"""Define what coordinator, provider and proxy agree on about an answer, beside its bytes."""

from __future__ import annotations

import msgspec

from convoy.api.anthropic.problem import CONTEXT_WORDS
from convoy.api.keys.repeats import CONTEXT_ERROR

# Names the two ends between which an answer was sealed, as far as the sender of the header knows.
SEALED_HEADER = "x-convoy-sealed"
# The limit of an answer that is not streamed.
MAX_WHOLE_BYTES = 64 * 1024 * 1024
# The limit of an engine's refusal.
MAX_REFUSAL_BYTES = 64 * 1024


class AnswerHead(msgspec.Struct, frozen=True):
    """Hold the first sealed piece of every answer."""

    status: int
    content_type: str


class AnswerCounts(msgspec.Struct, frozen=True):
    """Hold the last sealed piece of every answer: the provider's counts."""

    prompt_tokens: int
    completion_tokens: int


def is_of_engine(status: int) -> bool:
    """Return whether a status refuses the asker rather than the request.

    Another engine may then answer the request.
    """
    return status in {401, 403, 404, 408, 429} or status >= 500


def is_too_long(refusal: bytes) -> bool:
    """Return whether an engine's refusal says that the prompt does not fit its context."""
    try:
        error = msgspec.json.decode(refusal)["error"]
        return error.get("code") == CONTEXT_ERROR or str(error.get("message")).startswith(CONTEXT_WORDS)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError, KeyError, AttributeError):
        return False


def start(status: int, headers: dict[str, str]) -> dict[str, object]:
    """Return ASGI's first message of an answer."""
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": encoded}
