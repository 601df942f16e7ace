"""What coordinator, provider and proxy agree on of an answer, beside its bytes."""

from __future__ import annotations

import msgspec

from convoy.api.keys.repeats import CONTEXT_ERROR

SEALED_HEADER = "x-convoy-sealed"  # between whom an answer was sealed, as whoever sends the header knows
MAX_WHOLE_BYTES = 64 * 1024 * 1024  # of an answer that is no stream
MAX_REFUSAL_BYTES = 64 * 1024  # of an engine's body that is no answer


class AnswerHead(msgspec.Struct, frozen=True):
    """The first sealed piece of every answer."""

    status: int
    content_type: str


class AnswerCounts(msgspec.Struct, frozen=True):
    """The last sealed piece of every answer: what its provider counts."""

    prompt_tokens: int
    completion_tokens: int


def is_of_engine(status: int) -> bool:
    """Whether an engine that answers so refuses whoever asks, so that another may answer."""
    return status in {401, 403, 404, 408, 429} or status >= 500


def is_too_long(refusal: bytes) -> bool:
    """Return whether an engine's refusal says that the prompt does not fit its context."""
    try:
        error = msgspec.json.decode(refusal)["error"]
        return bool(error["code"] == CONTEXT_ERROR)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError, KeyError):
        return False


def start(status: int, headers: dict[str, str]) -> dict[str, object]:
    """ASGI's first message of an answer."""
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": encoded}
