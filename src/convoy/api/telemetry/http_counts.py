"""How many HTTP requests came to which path, and with which status they were answered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from convoy.cluster.metrics.families import Metric, counter

_NOBODY = 499  # as nginx says: the client went before there was an answer


class HttpCounts:
    """Around an application, its door included. On the event loop's thread; a scrape reads elsewhere."""

    def __init__(self, paths: Iterable[str]) -> None:
        """``paths``: those that exist, up to the first ``{``; any other counts as "other"."""
        self._paths = sorted((path.partition("{")[0] for path in paths), key=len, reverse=True)
        self._counts: Counter[tuple[str, int]] = Counter()

    def around(self, app: ASGIApp) -> ASGIApp:
        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            status = _NOBODY

            async def noting(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            try:
                await app(scope, receive, noting)
            finally:
                self._counts[self._known(scope["path"]), status] += 1

        return counted

    def families(self) -> Iterator[Metric]:
        """Up to now."""
        counts = sorted(self._counts.copy().items())
        values = [({"path": path, "status": str(status)}, n) for (path, status), n in counts]
        yield counter("convoy_http_requests", "HTTP requests that were answered.", values)

    def _known(self, path: str) -> str:
        for known in self._paths:
            if path == known or (known.endswith("/") and path.startswith(known)):
                return known
        return "other"
