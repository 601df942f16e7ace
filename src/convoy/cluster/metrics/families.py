"""Metric families for Prometheus, made at each scrape from the values of that moment, and their text.

This module counts nothing and registers nothing. Modules with counts yield families of them.

Each function imports Prometheus' library by itself. The library brings an HTTP server: 2 MB that a
coordinator and a proxy need at a scrape alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from convoy import __version__
from convoy.engine.stats import HistogramCounts

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric
else:
    # Other modules name this class in annotations alone.
    Metric = object

__all__ = [
    "Metric",
    "Source",
    "build_info",
    "content_type",
    "counter",
    "gauge",
    "histogram",
    "registry_of",
    "text_of",
]

Source = Callable[[], Iterable[Metric]]
Labels = Mapping[str, str]


def counter(name: str, text: str, values: Sequence[tuple[Labels, float]]) -> Metric:
    """Return a counter. ``name`` lacks its ``_total``. Each value has the same labels."""
    from prometheus_client.metrics_core import CounterMetricFamily

    family = CounterMetricFamily(name, text, labels=_names(values))
    for labels, value in values:
        family.add_metric(list(labels.values()), value)
    return family


def gauge(name: str, text: str, values: Sequence[tuple[Labels, float]]) -> Metric:
    from prometheus_client.metrics_core import GaugeMetricFamily

    family = GaugeMetricFamily(name, text, labels=_names(values))
    for labels, value in values:
        family.add_metric(list(labels.values()), value)
    return family


def histogram(name: str, text: str, values: Sequence[tuple[Labels, HistogramCounts]]) -> Metric:
    from prometheus_client.metrics_core import HistogramMetricFamily

    family = HistogramMetricFamily(name, text, labels=_names(values))
    for labels, counts in values:
        bounds = [*(str(bound) for bound in counts.bounds), "+Inf"]
        buckets = [(bound, float(count)) for bound, count in zip(bounds, counts.cumulative, strict=True)]
        family.add_metric(list(labels.values()), buckets, counts.sum)
    return family


def text_of(sources: Iterable[Source]) -> bytes:
    """Return the body of a scrape: Prometheus' text format, of `content_type`."""
    from prometheus_client import generate_latest

    return generate_latest(registry_of(sources))


def content_type() -> str:
    """Return the content type of Prometheus' text format."""
    from prometheus_client import CONTENT_TYPE_LATEST

    return CONTENT_TYPE_LATEST


def registry_of(sources: Iterable[Source]) -> CollectorRegistry:
    """Return a new registry of these sources."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.registry import Collector

    kept = tuple(sources)

    class Sources(Collector):
        def collect(self) -> Iterator[Metric]:
            for source in kept:
                yield from source()

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Sources())
    return registry


def _names(values: Sequence[tuple[Labels, object]]) -> list[str]:
    return list(values[0][0]) if values else []


def build_info(part: str) -> Metric:
    """Return the version of a program. ``part`` names the program of Convoy."""
    labels = {"part": part, "version": __version__}
    return gauge("convoy_build_info", "Always 1.", [(labels, 1)])
