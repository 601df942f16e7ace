"""A collector: takes what is posted by OTLP over HTTP, and keeps it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """``posted``: path and body of each post."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.posted: list[tuple[str, bytes]] = []

    def spans(self) -> list[tuple[str, Span]]:
        """Each with the service.name of who sent it."""
        return [
            (resource.resource.attributes[0].value.string_value, span)
            for _, data in list(self.posted)
            for resource in ExportTraceServiceRequest.FromString(data).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@contextmanager
def collecting() -> Iterator[Collector]:
    """On a port of its own."""

    class Receives(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.posted.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:  # it says every request to standard error
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Receives) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_address[1]}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield collector
        server.shutdown()
