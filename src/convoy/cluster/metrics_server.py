"""`/metrics` for a process that answers no HTTP otherwise: the library's own small server, on threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from convoy.cluster.metric_families import Source, registry_of
from convoy.errors import ConfigError

Environ = dict[str, Any]
StartResponse = Callable[[str, list[tuple[str, str]]], Any]
_PATH = "/metrics"
_READ_S = 10.0  # in which a request has to be there


class _Silent(WSGIRequestHandler):
    timeout = _READ_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's own names
        """Who scrapes every few seconds is no news."""


class _Server(ThreadingWSGIServer):
    daemon_threads = True
    block_on_close = False  # a scrape that hangs holds nobody up


@contextmanager
def metrics_server(
    sources: Iterable[Source], address: tuple[str, int], hosts: frozenset[str] | None
) -> Iterator[str]:
    """Its URL; it ends with the block. ``hosts``: names in a Host header that it answers to; None for all.

    Raises `ConfigError` where the address is not to be had.
    """
    host, port = address
    try:
        server = make_server(host, port, _app(sources, hosts), _Server, _Silent)
    except OSError as error:
        text = (error.strerror or str(error)).lower()
        raise ConfigError(
            f"cannot serve metrics on {host}:{port}: {text}",
            hint="--metrics wants an address of this machine and a free port",
        ) from error
    thread = threading.Thread(target=server.serve_forever, args=(0.2,), name="metrics", daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{server.server_address[1]}{_PATH}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _app(sources: Iterable[Source], hosts: frozenset[str] | None) -> Callable[..., Any]:
    scraped = make_wsgi_app(registry_of(sources))

    def app(environ: Environ, start_response: StartResponse) -> Any:
        # a foreign name that resolves to loopback is how a web page reaches what its reader's machine serves
        name = str(environ.get("HTTP_HOST", "")).rpartition(":")[0].lower()
        if hosts is not None and environ.get("HTTP_HOST") and name not in hosts:
            return _refuse(start_response, "403 Forbidden")
        if environ.get("PATH_INFO") != _PATH:
            return _refuse(start_response, "404 Not Found")
        if environ.get("REQUEST_METHOD") not in {"GET", "HEAD"}:
            return _refuse(start_response, "405 Method Not Allowed")
        return scraped(environ, start_response)

    return app


def _refuse(start_response: StartResponse, status: str) -> list[bytes]:
    start_response(status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", "0")])
    return [b""]
