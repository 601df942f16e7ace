"""What coordinator, provider and proxy agree on of an answer, beside its bytes."""

from __future__ import annotations

import msgspec

SEALED_HEADER = "x-convoy-sealed"  # between whom an answer was sealed, as whoever sends the header knows
MAX_WHOLE_BYTES = 64 * 1024 * 1024  # of an answer that is no stream


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


def start(status: int, headers: dict[str, str]) -> dict[str, object]:
    """ASGI's first message of an answer."""
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": encoded}
