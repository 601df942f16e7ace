"""``--traces URL``, and ``traces`` in [telemetry]: send spans of requests to an OpenTelemetry collector."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

from convoy.cli.flags.table import option

if TYPE_CHECKING:
    from convoy.api.traces import Traces

TracesFlag = Annotated[str | None, option("telemetry", "traces")]


@contextmanager
def tracing(url: str | None, service: str) -> Iterator[Traces]:
    """Yield traces that send spans of ``service`` to ``url``, or nowhere. Send the waiting spans at the end.

    Raises `ConfigError` for a wrong URL, and if OpenTelemetry is not installed.
    """
    from convoy.api.traces import NO_TRACES

    if url is None:
        yield NO_TRACES
        return
    from convoy.api.telemetry.otlp import OtlpTraces

    traces = OtlpTraces.to(url, service)
    try:
        yield traces
    finally:
        traces.close()
