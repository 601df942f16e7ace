"""What HTTP alone can get wrong: requests refused before they mean anything to the engine."""

from __future__ import annotations

from convoy.errors import CapacityError, RequestError


class UnknownModel(RequestError):  # noqa: N818
    """A model that is not served here (404)."""


class UnknownPath(RequestError):  # noqa: N818
    """A path that is not served here (404)."""


class WrongMethod(RequestError):  # noqa: N818
    """The path is served, but not with this method (405); ``allow`` lists those that are."""

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class Unauthenticated(RequestError):  # noqa: N818
    """No API key, or not the right one (401)."""


class WrongKey(Unauthenticated):
    """A key was sent, and it opens nothing here: it may be a guess."""


class Forbidden(RequestError):  # noqa: N818
    """A browser's cross-site request, or a host name this server does not answer to (403)."""


class BodyTooLong(RequestError):  # noqa: N818
    """A body over the limit (413); it was not parsed."""


class BodyTooSlow(RequestError):  # noqa: N818
    """A body that did not arrive in time (408)."""


class WrongMediaType(RequestError):  # noqa: N818
    """A body that is not JSON by its own headers (415)."""


class NotHttp(RequestError):  # noqa: N818
    """Bytes that are no HTTP request (400)."""


class HeaderTooLong(RequestError):  # noqa: N818
    """A header with too many bytes or fields (431); it was not kept."""


class Conflict(RequestError):  # noqa: N818
    """An Idempotency-Key that means another request, or one that is under way (409)."""


class NoBalance(CapacityError):  # noqa: N818
    """The account has less than the request may cost (402)."""


class RateLimited(CapacityError):  # noqa: N818
    """More than a key, an address or an identical request may ask for now (429)."""

    def __init__(self, message: str, *, retry_after_s: float, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class RepeatedRequest(RateLimited):
    """An identical request that failed again and again with a context error (429)."""


class ClientGone(Exception):  # noqa: N818 - not an error: nobody is left to tell
    """The client went away; whatever ran for it is to be aborted."""
