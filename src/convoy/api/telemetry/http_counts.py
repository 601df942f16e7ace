"""Count HTTP requests by path and by the status of their answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from convoy.cluster.metrics.families import Metric, counter

# nginx's number: the client disconnected before there was an answer.
_NOBODY = 499


class HttpCounts:
    """Count the requests of an application and its guard, on the event loop's thread. A scrape reads
    elsewhere.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int]] = Counter()

    def around(self, app: ASGIApp, routes: Iterable[Route]) -> ASGIApp:
        """Return ``app`` with every request counted.

        Requests count by the paths of ``routes``, each up to its first ``{``. Any other path counts as
        "other".
        """
        paths = sorted({route.path.partition("{")[0] for route in routes}, key=len, reverse=True)

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
                self._counts[_known(scope["path"], paths), status] += 1

        return counted

    def families(self) -> Iterator[Metric]:
        """Yield the counts so far."""
        counts = sorted(self._counts.copy().items())
        values = [({"path": path, "status": str(status)}, n) for (path, status), n in counts]
        yield counter("convoy_http_requests", "HTTP requests that were answered.", values)


def _known(path: str, paths: Iterable[str]) -> str:
    for known in paths:
        # Every path begins like the root.
        if path == known or (known.endswith("/") and known != "/" and path.startswith(known)):
            return known
    return "other"
