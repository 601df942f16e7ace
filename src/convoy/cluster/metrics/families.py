"""Metric families for Prometheus, made at each scrape from the values of that moment, and their text.

This module counts nothing and registers nothing. Modules with counts yield families of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from convoy import __version__
from convoy.engine.stats import HistogramCounts

__all__ = [
    "CONTENT_TYPE_LATEST",
    "Metric",
    "Source",
    "build_info",
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
    family = CounterMetricFamily(name, text, labels=_names(values))
    for labels, value in values:
        family.add_metric(list(labels.values()), value)
    return family


def gauge(name: str, text: str, values: Sequence[tuple[Labels, float]]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=_names(values))
    for labels, value in values:
        family.add_metric(list(labels.values()), value)
    return family


def histogram(name: str, text: str, values: Sequence[tuple[Labels, HistogramCounts]]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=_names(values))
    for labels, counts in values:
        bounds = [*(str(bound) for bound in counts.bounds), "+Inf"]
        buckets = [(bound, float(count)) for bound, count in zip(bounds, counts.cumulative, strict=True)]
        family.add_metric(list(labels.values()), buckets, counts.sum)
    return family


def text_of(sources: Iterable[Source]) -> bytes:
    """Return the body of a scrape: Prometheus' text format, of `CONTENT_TYPE_LATEST`."""
    return generate_latest(registry_of(sources))


def registry_of(sources: Iterable[Source]) -> CollectorRegistry:
    """Return a new registry of these sources."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Sources(tuple(sources)))
    return registry


class _Sources(Collector):
    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        for source in self._sources:
            yield from source()


def _names(values: Sequence[tuple[Labels, object]]) -> list[str]:
    return list(values[0][0]) if values else []


def build_info(part: str) -> Metric:
    """Return the version of a program. ``part`` names the program of Convoy."""
    labels = {"part": part, "version": __version__}
    return gauge("convoy_build_info", "Always 1.", [(labels, 1)])
