"""What a caller keeps of a request that it submitted."""

from __future__ import annotations

from collections.abc import Callable


class RequestHandle:
    """A submitted request; `abort` ends it and may be called from any thread, at any time, more than once."""

    def __init__(self, abort: Callable[[], None]) -> None:
        self._abort = abort

    def abort(self) -> None:
        self._abort()
