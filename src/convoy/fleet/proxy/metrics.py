"""Count a proxy's requests. No label is a model, because the model that a tool names is the tool's text.

It is apart from the proxy so that all labels stand in one place, where a reader can check that none is text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from convoy.api.exchange import Exchange
from convoy.cluster.metrics.families import Metric, build_info, counter
from convoy.fleet.outcomes import LabelSums, word_of


class ProxyCounts:
    """Count requests. Lives on the event loop's thread."""

    def __init__(self) -> None:
        self._requests = LabelSums("outcome")
        self.plain = self.resealed = self.usage_differs = 0

    @contextmanager
    def answering(self, exchange: Exchange) -> Iterator[None]:
        """Count one request that was understood, with its outcome."""
        outcome = "complete"
        try:
            yield
            outcome = exchange.outcome or outcome
        except asyncio.CancelledError:
            outcome = "client gone"
            raise
        except Exception as error:
            outcome = type(error).__name__
            raise
        finally:
            self._requests.add(word_of(outcome))

    def families(self) -> Iterator[Metric]:
        """Yield the metrics up to now."""
        yield build_info("proxy")
        yield self._requests.family("convoy_proxy_requests", "Requests that are over, and how.")
        for name, text, value in (
            ("convoy_proxy_plain", "Requests that were sent in plain, as it was allowed.", self.plain),
            ("convoy_proxy_resealed", "Bodies that were sealed anew, to another provider.", self.resealed),
            ("convoy_proxy_usage_differs", "Bills that differ from the sealed counts.", self.usage_differs),
        ):
            yield counter(name, text, [({}, value)])
