"""A small HTTP listener for scrapers: one thread, bounded in connections, in bytes and in time.

It reads every request's header without blocking and sends the whole answer of a WSGI application. The
library's own server has a thread per connection, which idle clients use up.
"""

from __future__ import annotations

import io
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from convoy.transport.listen.places import Clock, ConnectionSlot, ConnectionSlots, SlotLimits

_ACCEPTS_AT_ONCE = 32
_POLL_S = 0.2
_RETRY_S = 0.05
_TOO_LONG = b"HTTP/1.0 431 Request Header Fields Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_log = logging.getLogger(__name__)
WsgiApp = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class ScrapeLimits:
    """Bound connections. ``request_timeout_s`` is from a connection's accept to its answer's last byte.

    `http.client` bounds the number of fields to 100.
    """

    max_header_bytes: int = 32 * 1024
    request_timeout_s: float = 10.0
    max_connections: int = 128
    max_connections_per_address: int = 96
    clock: Clock = field(default=time.monotonic, compare=False, repr=False)


class ScrapeListener:
    """Listen from construction to `close`. Raises `OSError` if the address cannot be bound."""

    def __init__(self, address: tuple[str, int], app: WsgiApp, limits: ScrapeLimits | None = None) -> None:
        self._limits = limits or ScrapeLimits()
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        self._socket = socket.create_server(address, family=family, backlog=512)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._answer = _Answers(app, address[0], self.port)
        most, of_one_address = self._limits.max_connections, self._limits.max_connections_per_address
        capacity = SlotLimits(waiting=most, working=0, kept=0, of_one_address=of_one_address)
        self._places = ConnectionSlots(capacity, self._limits.request_timeout_s, self._limits.clock)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and end every connection."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                for key, _ in self._selector.select(_POLL_S):
                    if key.data is None:
                        self._accept()
                    # Accepting another connection in this round may have closed this one.
                    elif not key.data.closed:
                        key.data.go_on()
                self._places.expire()
        finally:
            for key in list(self._selector.get_map().values()):
                if key.data is not None:
                    key.data.close()
            self._selector.close()
            self._socket.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                sock, address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            # The process is out of descriptors. Closing connections frees some.
            except OSError as error:
                _log.warning("cannot accept a scraper's connection: %s", error.strerror or error)
                self._places.shed(_ACCEPTS_AT_ONCE)
                self._closed.wait(_RETRY_S)
                return
            sock.setblocking(False)
            scraper = _Scraper(sock, self._selector, self._answer, self._limits)
            scraper.place = self._places.take(str(address[0]), scraper.close)


class _Scraper:
    """Serve one connection: a header comes in, an answer goes out, and the connection ends."""

    def __init__(
        self, sock: socket.socket, selector: selectors.BaseSelector, answer: _Answers, limits: ScrapeLimits
    ) -> None:
        self._socket = sock
        self._selector = selector
        self._answer = answer
        self._max_bytes = limits.max_header_bytes
        self._header = bytearray()
        self._unsent = memoryview(b"")
        self.place: ConnectionSlot | None = None
        self.closed = False
        selector.register(sock, selectors.EVENT_READ, self)

    def go_on(self) -> None:
        """Read or write as much as possible without waiting."""
        try:
            if self._unsent or self._has_header():
                self._send()
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()

    def close(self) -> None:
        """Close the connection. A second call does nothing."""
        if self.closed:
            return
        self.closed = True
        if self.place is not None:
            self.place.release()
        self._selector.unregister(self._socket)
        self._socket.close()

    def _has_header(self) -> bool:
        """Read on, and return whether there is an answer to send."""
        part = self._socket.recv(self._max_bytes + 1 - len(self._header))
        if not part:
            self.close()
            return False
        looked = max(0, len(self._header) - 3)
        self._header += part
        if any(self._header.find(end, looked) >= 0 for end in (b"\r\n\r\n", b"\n\n")):
            self._unsent = memoryview(self._answer(bytes(self._header), self._socket.getpeername()))
        elif len(self._header) > self._max_bytes:
            self._unsent = memoryview(_TOO_LONG)
        if self._unsent:
            self._selector.modify(self._socket, selectors.EVENT_WRITE, self)
        return bool(self._unsent)

    def _send(self) -> None:
        self._unsent = self._unsent[self._socket.send(self._unsent) :]
        if not self._unsent:
            self.close()


class _Answers:
    """Answer headers with a WSGI application, through the library's handler and without its sockets."""

    def __init__(self, app: WsgiApp, host: str, port: int) -> None:
        self._app = app
        self.base_environ = {
            "SERVER_NAME": host,
            "SERVER_PORT": str(port),
            "GATEWAY_INTERFACE": "CGI/1.1",
            "REMOTE_HOST": "",
            "CONTENT_LENGTH": "",
            "SCRIPT_NAME": "",
        }

    def __call__(self, header: bytes, address: tuple[Any, ...]) -> bytes:
        exchange: Any = _Exchange(header)
        server: Any = self
        _Silent(exchange, address, server)
        return bytes(exchange.answer)

    def get_app(self) -> WsgiApp:
        """Return the application, as `WSGIServer` does."""
        return self._app


class _Exchange:
    """Stand in for a handler's socket: it reads ``header``, and its ``answer`` is kept."""

    def __init__(self, header: bytes) -> None:
        self._header = header
        self.answer = bytearray()

    def makefile(self, mode: str, size: int) -> io.BytesIO:  # noqa: ARG002 - a socket's
        return io.BytesIO(self._header)

    def sendall(self, data: bytes) -> None:
        self.answer += data


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's own names
        """Log nothing: a scrape every few seconds is no news."""
