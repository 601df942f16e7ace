"""Write errors in the form of a failed response.

It is apart from `answer` because coordinators and proxies write such errors too, and need nothing of an
engine.
"""

from __future__ import annotations

from convoy.api.keys.repeats import CONTEXT_ERROR
from convoy.api.problem import ErrorDetail, answer_for, body_for, headers_for
from convoy.api.responses.shapes import ResponseError

# Clients do not try again after these codes, and do after a fault of the server.
_CODES = frozenset({CONTEXT_ERROR, "insufficient_quota"})
_RATE_LIMITED = 429


def error_of(error: BaseException) -> ResponseError:
    """Return an error as a failed response has it."""
    retry_after = headers_for(error).get("retry-after", "")
    return failed_error(answer_for(error).status, body_for(error).error, retry_after)


def failed_error(status: int, detail: ErrorDetail, retry_after: str = "") -> ResponseError:
    """Return an error of OpenAI's form as a failed response has it. ``retry_after`` is in seconds."""
    own, message = detail.code or detail.type, detail.message
    if status == _RATE_LIMITED:
        # Clients read the time from the text.
        message = f"{message}; try again in {retry_after}s" if retry_after else message
        return ResponseError("rate_limit_exceeded", message, own, detail.param)
    return ResponseError(own if own in _CODES else "server_error", message, own, detail.param)
