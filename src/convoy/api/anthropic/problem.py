"""Write errors in Anthropic's form, and decide which requests get it."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import Scope

from convoy.api.anthropic.shapes import MessageError, MessageErrorBody
from convoy.api.keys.repeats import CONTEXT_ERROR
from convoy.api.problem import Problem, answer_for, body_for

VERSION_HEADER = "anthropic-version"
PATH = "/v1/messages"
_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
# Clients shorten the conversation when they read one of these.
_CONTEXT_WORDS = ("prompt is too long", "input length and `max_tokens` exceed context limit")


def problem_of(error: BaseException) -> MessageErrorBody:
    """Return the error as a client may see it."""
    detail = body_for(error).error
    message = detail.message
    if detail.code == CONTEXT_ERROR and not message.startswith(_CONTEXT_WORDS):
        # The engine found it, or the request was refused unread because it failed before.
        message = f"{_CONTEXT_WORDS[0]}: {message}"
    return MessageErrorBody(
        MessageError(_TYPES.get(answer_for(error).status, "invalid_request_error"), message)
    )


def problem_for(scope: Scope) -> Problem:
    """Return the form of errors for a request: Anthropic's on its own paths and for its clients."""
    path = scope["path"]
    own = path == PATH or path.startswith(f"{PATH}/")
    return problem_of if own or VERSION_HEADER in Headers(scope=scope) else body_for
