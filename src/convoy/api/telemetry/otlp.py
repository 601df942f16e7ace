"""Send spans to a collector by OTLP over HTTP. Only this module imports OpenTelemetry, and only on demand.

The package itself sends spans: on a thread and in batches, and it drops them if the collector does not keep
up. So no request waits for it. It reads ``OTEL_EXPORTER_OTLP_HEADERS`` for a collector that needs a key.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from convoy.api.traces import ERROR, MODEL, OUTCOME, TraceSpan, Value, operation_of, read_traceparent
from convoy.config.clear_text import check_sealed
from convoy.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span as RawSpan
    from opentelemetry.trace import Tracer

_PATH = "/v1/traces"
_SEND_S = 5.0
_MAX_WAITING, _MAX_BATCH = 4096, 512
_EVERY_S = 2.0


def traces_url(url: str) -> str:
    """Return the URL that spans are posted to: ``url``, with the usual path if it has none.

    Raises `ConfigError` for a URL without TLS off this machine: model names and times cross no network in
    clear text.
    """
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.username or parts.password:
        raise ConfigError(
            f"the collector {url.rpartition('@')[2][:200]!r} is no URL of OTLP over HTTP",
            hint="use a URL like http://127.0.0.1:4318, without a name or password in it",
        )
    check_sealed(url, "send traces to")
    return url.rstrip("/") + _PATH if parts.path in {"", "/"} else url


class OtlpTraces:
    """Send spans until `close`."""

    is_on = True

    def __init__(self, service: str, processor: SpanProcessor) -> None:
        """Send spans through ``processor``. ``service`` is the service.name of all spans."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased

        self._provider = TracerProvider(
            resource=Resource({"service.name": service}),
            # A caller may mark its request as not sampled.
            sampler=ParentBased(ALWAYS_ON),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("convoy")

    @classmethod
    def to(cls, url: str, service: str) -> OtlpTraces:
        """Return traces that go to a collector.

        Raises `ConfigError` for an invalid URL, or if the package is missing.
        """
        endpoint = traces_url(url)
        try:
            import requests
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise ConfigError(
                "traces need the packages of OpenTelemetry", hint="pip install 'WHEEL[telemetry]'"
            ) from None
        session = requests.Session()
        # Proxies and credentials of the environment are not meant for this connection.
        session.trust_env = False
        exporter = OTLPSpanExporter(endpoint, timeout=_SEND_S, session=session)
        processor = BatchSpanProcessor(
            exporter,
            max_queue_size=_MAX_WAITING,
            max_export_batch_size=_MAX_BATCH,
            schedule_delay_millis=1000 * _EVERY_S,
            export_timeout_millis=1000 * _SEND_S,
        )
        return cls(service, processor)

    def begin(self, kind: str, model: str, parent: str = "", ago_s: float = 0.0) -> TraceSpan:
        """Begin a span, as `Traces` describes."""
        from opentelemetry.trace import SpanKind

        operation = operation_of(kind)
        start_ns = time.time_ns() - round(1e9 * ago_s)
        names: dict[str, Value] = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "convoy"}
        raw = self._tracer.start_span(
            f"{operation} {model}".strip(),
            context=_context(parent),
            kind=SpanKind.SERVER,
            attributes={**names, MODEL: model} if model else names,
            start_time=start_ns,
        )
        return _OtlpSpan(self._tracer, raw, operation, start_ns)

    def close(self) -> None:
        """Send the spans that wait, for a few seconds at most."""
        self._provider.force_flush(int(1000 * _SEND_S))
        self._provider.shutdown()


class _OtlpSpan:
    def __init__(self, tracer: Tracer, raw: RawSpan, operation: str, start_ns: int) -> None:
        self._tracer = tracer
        self._raw = raw
        self._operation = operation
        self._start_ns = start_ns

    @property
    def traceparent(self) -> str:
        context = self._raw.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 1:02x}"

    def note(self, values: Mapping[str, Value]) -> None:
        for name, value in values.items():
            self._raw.set_attribute(name, value)
        if MODEL in values:
            self._raw.update_name(f"{self._operation} {values[MODEL]}")

    def part(self, name: str, start_s: float, end_s: float) -> None:
        from opentelemetry.trace import set_span_in_context

        child = self._tracer.start_span(
            name, context=set_span_in_context(self._raw), start_time=self._ns(start_s)
        )
        child.end(self._ns(max(start_s, end_s)))

    def end(self, outcome: str) -> None:
        from opentelemetry.trace import StatusCode

        if not self._raw.is_recording():
            return
        self._raw.set_attribute(OUTCOME, outcome)
        # An error's class begins with a capital. A client that disconnects is no error.
        if outcome[:1].isupper():
            self._raw.set_attribute(ERROR, outcome)
            self._raw.set_status(StatusCode.ERROR)
        self._raw.end()

    def _ns(self, seconds: float) -> int:
        return self._start_ns + round(1e9 * seconds)


def _context(parent: str) -> Context:
    """Return the context of the client's traceparent; an empty one begins a new trace."""
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    found = read_traceparent(parent)
    if found is None:
        return Context()
    trace_id, span_id, flags = found
    said = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags & 1))
    return set_span_in_context(NonRecordingSpan(said), Context())
