"""Define the errors of HTTP alone: requests refused before they reach the engine."""

from __future__ import annotations

from convoy.errors import CapacityError, RequestError


class UnknownModel(RequestError):  # noqa: N818
    """Report a model that is not served here (404)."""


class UnknownResponse(RequestError):  # noqa: N818
    """Report a response that is not stored for this key (404)."""


class UnknownStream(RequestError):  # noqa: N818
    """Report a stream, or events of one, that are not kept for this key (404)."""


class StreamTaken(RequestError):  # noqa: N818
    """Report that a newer connection gets the events of this stream (409)."""


class UnknownPath(RequestError):  # noqa: N818
    """Report a path that is not served here (404)."""


class WrongMethod(RequestError):  # noqa: N818
    """Report a method that the path does not take (405); ``allow`` lists those that it takes."""

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class Unauthenticated(RequestError):  # noqa: N818
    """Report a missing or wrong API key (401)."""


class WrongKey(Unauthenticated):
    """Report a key that is not valid here. It may be a guess."""


class Forbidden(RequestError):  # noqa: N818
    """Refuse a browser's cross-site request, or a host name that is not this server's (403)."""


class BodyTooLong(RequestError):  # noqa: N818
    """Report a body over the limit (413). It was not parsed."""


class BodyTooSlow(RequestError):  # noqa: N818
    """Report a body that did not arrive in time (408)."""


class WrongMediaType(RequestError):  # noqa: N818
    """Report a body that is not JSON by its own headers (415)."""


class NotHttp(RequestError):  # noqa: N818
    """Report bytes that are no HTTP request (400)."""


class HeaderTooLong(RequestError):  # noqa: N818
    """Report a header with too many bytes or fields (431). It was not kept."""


class Conflict(RequestError):  # noqa: N818
    """Report an Idempotency-Key of another request, or of one that still runs (409)."""


class NoBalance(CapacityError):  # noqa: N818
    """Report an account with less than the request may cost (402)."""


class RateLimited(CapacityError):  # noqa: N818
    """Limit a key, an address or an identical request that exceeds its rate (429)."""

    def __init__(self, message: str, *, retry_after_s: float, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class RepeatedRequest(RateLimited):
    """Refuse an identical request that failed repeatedly with a context error (429)."""


class ModelNotLoaded(CapacityError):  # noqa: N818
    """Report that a request waited too long for its model, or that too many wait (503)."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message, hint="ask again later, or name the model that is loaded")
        self.retry_after_s = retry_after_s


class ClientGone(Exception):  # noqa: N818 - not an error: no client is left to receive one
    """Signal that the client disconnected. All work for the request must be aborted."""
