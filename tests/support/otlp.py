"""A collector that takes and keeps the spans posted by OTLP over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """Hold path and body of each post in ``posted``."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.posted: list[tuple[str, bytes]] = []

    def spans(self) -> list[tuple[str, Span]]:
        """Return each span with its sender's service.name."""
        return [
            (resource.resource.attributes[0].value.string_value, span)
            for _, data in list(self.posted)
            for resource in ExportTraceServiceRequest.FromString(data).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector on a port of its own until the block ends."""

    class Receives(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.posted.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        # The base class writes every request to standard error.
        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Receives) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_address[1]}")
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield collector
        server.shutdown()
