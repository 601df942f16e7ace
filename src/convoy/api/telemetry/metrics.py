"""Serve ``GET /metrics``: the state of the server's parts at that moment, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response

from convoy.api.keys.keys import Caller
from convoy.api.lifecycle import Lifecycle
from convoy.cluster.metrics.families import Metric, Source, content_type, gauge, text_of

OfCaller = Callable[[Caller], Iterable[Metric]]


class Metrics:
    """Serve the metrics; the guard has checked the reader before. ``sources`` are called on a thread.

    ``of_caller`` yields the families that depend on the reader.
    """

    def __init__(
        self, sources: Sequence[Source], lifecycle: Lifecycle, of_caller: OfCaller | None = None
    ) -> None:
        self._sources = (*sources, lambda: http_families(lifecycle))
        self._of_caller = of_caller

    async def answer(self, request: Request) -> Response:
        sources = self._sources
        if self._of_caller is not None:
            sources = (*sources, partial(self._of_caller, request.scope["convoy.caller"]))
        text = await anyio.to_thread.run_sync(text_of, sources)
        return Response(text, headers={"content-type": content_type(), "cache-control": "no-store"})


def http_families(lifecycle: Lifecycle) -> Iterator[Metric]:
    """Yield the families of the HTTP server itself."""
    answers, draining = lifecycle.num_answers, int(lifecycle.draining)
    yield gauge("convoy_http_answers", "Requests that are being answered.", [({}, answers)])
    yield gauge("convoy_draining", "1 once no more requests are taken.", [({}, draining)])
