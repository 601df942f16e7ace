"""An HTTP server between an agent and Convoy that keeps every request and the bytes of every answer."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_TIMEOUT_S = 400.0
# Headers of one connection (RFC 9110, 7.6.1).
_OF_ONE_HOP = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding"})


@dataclass
class Exchange:
    """Hold one request and its answer, as far as it came."""

    method: str
    path: str
    body: bytes
    status: int = 0
    answer: bytearray = field(default_factory=bytearray)

    @property
    def asked(self) -> dict[str, Any]:
        """Return the body of the request, which must be a JSON object."""
        found: dict[str, Any] = json.loads(self.body)
        return found

    @property
    def has_tools(self) -> bool:
        """Tell whether the request offers tools, so that its answer is a turn of the loop."""
        return bool(self.body) and bool(self.asked.get("tools"))


class Recorder:
    """Listen on a port of loopback and pass every request on to ``url``, until `close`."""

    def __init__(self, url: str) -> None:
        self.exchanges: list[Exchange] = []
        self._changed = threading.Condition()
        target = urlsplit(url).netloc

        class Handler(_Handler):
            recorder, upstream = self, target

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="recorder", daemon=True)
        self._thread.start()

    @property
    def turns(self) -> list[Exchange]:
        """Return the requests that offer tools, in order."""
        with self._changed:
            return [one for one in self.exchanges if one.has_tools]

    def wait_for(self, condition: Callable[[list[Exchange]], bool], timeout_s: float) -> bool:
        """Return whether ``condition`` holds for the exchanges, within ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: condition(self.exchanges), timeout_s)

    def begin(self, exchange: Exchange) -> None:
        with self._changed:
            self.exchanges.append(exchange)

    def add(self, exchange: Exchange, data: bytes) -> None:
        with self._changed:
            exchange.answer += data
            self._changed.notify_all()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """Serve one connection of an agent."""

    recorder: Recorder
    upstream: str
    protocol_version = "HTTP/1.1"

    def log_message(self, *_arguments: object) -> None:
        """Write nothing: the exchanges are the log."""

    def do_HEAD(self) -> None:
        self._pass_on()

    def do_GET(self) -> None:
        self._pass_on()

    def do_POST(self) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        exchange = Exchange(self.command, self.path, body)
        self.recorder.begin(exchange)
        there = http.client.HTTPConnection(self.upstream, timeout=_TIMEOUT_S)
        try:
            kept = {name: value for name, value in self.headers.items() if name.lower() not in _OF_ONE_HOP}
            # An agent takes compressed answers too, and this test reads them.
            kept.pop("Accept-Encoding", None)
            there.request(self.command, self.path, body or None, kept)
            self._answer(exchange, there.getresponse())
        except (BrokenPipeError, ConnectionResetError):
            # The agent has gone, as it may.
            self.close_connection = True
        finally:
            there.close()

    def _answer(self, exchange: Exchange, answer: http.client.HTTPResponse) -> None:
        exchange.status = answer.status
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in {*_OF_ONE_HOP, "date", "server"}:
                self.send_header(name, value)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while data := answer.read1(65536):
            self.recorder.add(exchange, data)
            self._write_chunk(data)
        if self.command != "HEAD":
            self.wfile.write(b"0\r\n\r\n")

    def _write_chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()
