"""Trace a proxy's work on one request. The span names the model only once the coordinator knows it.

It is apart from the proxy because tracing decides nothing: a reader of a request's path needs none of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from convoy.api.exchange import Exchange
from convoy.api.traces import FIRST_S, MAX_TOKENS, MODEL, STREAM, Traces, TraceSpan
from convoy.fleet.consumer_request import ConsumerRequest
from convoy.fleet.outcomes import outcome_of


class ProxySpan:
    """Note the times of the lease, of the first token and of the rest."""

    def __init__(self, span: TraceSpan) -> None:
        self._span = span
        self._began_s = time.perf_counter()
        self._leased_s = self._first_s = 0.0
        self.traceparent = span.traceparent

    def leased(self, wanted: ConsumerRequest) -> None:
        """Note that a provider is free for the request."""
        self._leased_s = self._now_s()
        self._span.note({MODEL: wanted.model, MAX_TOKENS: wanted.max_tokens, STREAM: wanted.stream})
        self._span.part("lease", 0.0, self._leased_s)

    def first_token(self) -> None:
        """Note that the answer begins, under the seal."""
        self._first_s = self._now_s()
        self._span.note({FIRST_S: self._first_s})
        self._span.part("first_token", self._leased_s, self._first_s)

    def end(self, exchange: Exchange, outcome: str) -> None:
        """End the span. ``exchange`` is the one with the tool."""
        if self._first_s:
            self._span.part("answer", self._first_s, self._now_s())
        self._span.note({"convoy.request.id": exchange.id})
        self._span.end(outcome)

    def _now_s(self) -> float:
        return time.perf_counter() - self._began_s


@contextmanager
def proxied(traces: Traces, kind: str, parent: str, exchange: Exchange) -> Iterator[ProxySpan]:
    """Yield the span of the work inside."""
    span = ProxySpan(traces.begin(kind, "", parent))
    try:
        yield span
    except BaseException as error:
        span.end(exchange, outcome_of(error))
        raise
    span.end(exchange, exchange.outcome or "complete")
