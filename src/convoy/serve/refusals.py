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


class Forbidden(RequestError):  # noqa: N818
    """A browser's cross-site request, or a host name this server does not answer to (403)."""


class BodyTooLong(RequestError):  # noqa: N818
    """A body over the limit (413); it was not parsed."""


class BodyTooSlow(RequestError):  # noqa: N818
    """A body that did not arrive in time (408)."""


class WrongMediaType(RequestError):  # noqa: N818
    """A body that is not JSON by its own headers (415)."""


class Conflict(RequestError):  # noqa: N818
    """An Idempotency-Key that means another request, or one that is under way (409)."""


class NoBalance(CapacityError):  # noqa: N818
    """The account has less than the request may cost (402)."""


class ClientGone(Exception):  # noqa: N818 - not an error: nobody is left to tell
    """The client went away; whatever ran for it is to be aborted."""
