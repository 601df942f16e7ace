"""Write errors in Ollama's form. It is apart because answers and the table of paths both use it."""

from __future__ import annotations

import msgspec

from convoy.api.problem import body_for

PREFIX = "/api/"


class OllamaError(msgspec.Struct, frozen=True):
    """Hold the body of an error, and the last line of a broken stream."""

    error: str


def problem_of(error: BaseException) -> OllamaError:
    """Return the error as a client may see it."""
    return OllamaError(body_for(error).error.message)
