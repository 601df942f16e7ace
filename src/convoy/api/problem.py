"""Translate errors for clients: a table from error class to HTTP status, and OpenAI's error body."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from convoy import errors
from convoy.api import refusals


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """Describe the answer to one class of errors.

    Without ``shown``, the error's message stays inside, because a peer may have written a part of it. The
    client gets the error's ``public`` text, or else ``text``.
    """

    status: int
    type: str
    code: str | None = None
    text: str = ""
    shown: bool = True


_INVALID = "invalid_request_error"
_INTERNAL = ErrorResponse(
    500, "server_error", "internal_error", "the server met an internal error", shown=False
)

# The nearest class among an error's bases decides. An operator's mistake is no client's fault: the client
# gets status 500 without the text.
ANSWERS: dict[type[Exception], ErrorResponse] = {
    errors.InputError: _INTERNAL,
    errors.RequestError: ErrorResponse(400, _INVALID),
    refusals.UnknownModel: ErrorResponse(404, _INVALID, "model_not_found"),
    refusals.UnknownResponse: ErrorResponse(404, _INVALID, "response_not_found"),
    refusals.UnknownStream: ErrorResponse(404, _INVALID, "stream_not_found"),
    refusals.StreamTaken: ErrorResponse(409, _INVALID, "stream_taken"),
    refusals.UnknownPath: ErrorResponse(404, _INVALID, "not_found"),
    refusals.WrongMethod: ErrorResponse(405, _INVALID, "method_not_allowed"),
    refusals.Unauthenticated: ErrorResponse(401, "authentication_error", "invalid_api_key"),
    refusals.Forbidden: ErrorResponse(403, "permission_error", "forbidden"),
    refusals.BodyTooLong: ErrorResponse(413, _INVALID, "body_too_long"),
    refusals.BodyTooSlow: ErrorResponse(408, _INVALID, "body_timeout"),
    refusals.WrongMediaType: ErrorResponse(415, _INVALID, "unsupported_media_type"),
    refusals.NotHttp: ErrorResponse(400, _INVALID, "not_http"),
    refusals.HeaderTooLong: ErrorResponse(431, _INVALID, "header_too_long"),
    refusals.Conflict: ErrorResponse(409, _INVALID, "idempotency_conflict"),
    refusals.NoBalance: ErrorResponse(402, "insufficient_quota", "insufficient_quota"),
    refusals.RateLimited: ErrorResponse(429, "rate_limit_error", "rate_limit_exceeded"),
    refusals.RepeatedRequest: ErrorResponse(429, "rate_limit_error", "context_length_exceeded"),
    refusals.ModelNotLoaded: ErrorResponse(503, "server_error", "model_not_loaded"),
    errors.CapacityError: ErrorResponse(503, "server_error", "no_capacity"),
    errors.PlanError: ErrorResponse(
        503, "server_error", "no_capacity", "no plan fits the members", shown=False
    ),
    errors.QueueFull: ErrorResponse(429, "rate_limit_error", "queue_full"),
    errors.PeerError: ErrorResponse(
        503, "server_error", "peer_failed", "a member of the cluster failed", shown=False
    ),
    errors.Unavailable: ErrorResponse(
        503, "server_error", "unavailable", "the request cannot be served now", shown=False
    ),
    errors.NotReady: ErrorResponse(
        503, "server_error", "not_ready", "no token passes every stage now", shown=False
    ),
    errors.Draining: ErrorResponse(503, "server_error", "draining"),
    errors.StageLost: ErrorResponse(
        503, "server_error", "stage_lost", "a stage of the model was lost", shown=False
    ),
    errors.LinkClosed: ErrorResponse(
        503, "server_error", "peer_failed", "a member of the cluster left", shown=False
    ),
    errors.SelfCheckError: _INTERNAL,
}


# The form of an API's errors: an error becomes the body of its answer.
Problem = Callable[[BaseException], msgspec.Struct]


class ErrorDetail(msgspec.Struct, frozen=True):
    """Hold OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """Hold the body of every answer that is not 2xx. A broken stream ends with it too."""

    error: ErrorDetail


def answer_for(error: BaseException) -> ErrorResponse:
    """Return the table's row for ``error``; an unknown error is an internal error."""
    for base in type(error).__mro__:
        if base in ANSWERS:
            return ANSWERS[base]
    return _INTERNAL


def body_for(error: BaseException) -> ErrorBody:
    """Return the error as a client may see it."""
    answer = answer_for(error)
    message = getattr(error, "public", None) or answer.text
    if answer.shown and isinstance(error, errors.ConvoyError):
        message = f"{error.message} ({error.hint})" if error.hint else error.message
    param, code = None, answer.code
    if isinstance(error, errors.RequestError):
        param, code = error.param, error.code or answer.code
    return ErrorBody(ErrorDetail(message, answer.type, param, code))


def headers_for(error: BaseException) -> dict[str, str]:
    """Return the headers that belong to the status of ``error``."""
    status = answer_for(error).status
    headers = {}
    if status in {429, 503}:
        wait_s = getattr(error, "retry_after_s", None) or (1 if status == 429 else 5)
        headers["retry-after"] = str(math.ceil(wait_s))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, refusals.WrongMethod):
        headers["allow"] = error.allow
    # The rest of an unread body must not be parsed as the next request.
    if status in {408, 413, 431} or isinstance(error, errors.Draining | refusals.NotHttp):
        headers["connection"] = "close"
    return headers


def log_internal_error(log: logging.Logger, request_id: str, error: BaseException) -> None:
    """Log the class of an internal error and the ``file:line`` that raised it. Its text may hold a prompt."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else "?"
    log.error("internal error request=%s class=%s at=%s", request_id, type(error).__name__, place)
