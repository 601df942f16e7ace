"""Serve `/metrics` for a process without another HTTP server."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import make_wsgi_app

from convoy.cluster.metrics.families import Source, registry_of
from convoy.cluster.metrics.scrape_listener import ScrapeListener
from convoy.errors import ConfigError

Environ = dict[str, Any]
StartResponse = Callable[[str, list[tuple[str, str]]], Any]
_PATH = "/metrics"


@contextmanager
def metrics_server(
    sources: Iterable[Source],
    address: tuple[str, int],
    hosts: frozenset[str] | None,
    admits: Callable[[dict[str, str]], bool] | None = None,
) -> Iterator[str]:
    """Serve metrics for the duration of the block, and yield the URL.

    ``hosts`` are the names in a Host header that it answers to; None for all. ``admits`` returns whether
    headers, by their names in lower case, carry a right key; None asks for none. Raises `ConfigError` if
    the address cannot be bound.
    """
    host, port = address
    try:
        listener = ScrapeListener(address, _app(sources, hosts, admits))
    except OSError as error:
        text = (error.strerror or str(error)).lower()
        raise ConfigError(
            f"cannot serve metrics on {host}:{port}: {text}",
            hint="--metrics wants an address of this machine and a free port",
        ) from error
    try:
        yield f"http://{host}:{listener.port}{_PATH}"
    finally:
        listener.close()


def _app(
    sources: Iterable[Source], hosts: frozenset[str] | None, admits: Callable[[dict[str, str]], bool] | None
) -> Callable[..., Any]:
    scraped = make_wsgi_app(registry_of(sources))

    def app(environ: Environ, start_response: StartResponse) -> Any:
        # A web page can reach services on its reader's machine by a foreign name that resolves to loopback.
        # So only known names are answered.
        name = str(environ.get("HTTP_HOST", "")).rpartition(":")[0].lower()
        if hosts is not None and environ.get("HTTP_HOST") and name not in hosts:
            return _refuse(start_response, "403 Forbidden")
        if re.sub("//+", "/", str(environ.get("PATH_INFO"))).rstrip("/") != _PATH:
            return _refuse(start_response, "404 Not Found")
        if environ.get("REQUEST_METHOD") not in {"GET", "HEAD"}:
            return _refuse(start_response, "405 Method Not Allowed")
        if admits is not None and not admits(_key_headers(environ)):
            return _refuse(start_response, "401 Unauthorized", ("WWW-Authenticate", "Bearer"))
        return scraped(environ, start_response)

    return app


def _key_headers(environ: Environ) -> dict[str, str]:
    found = {
        name: environ.get(f"HTTP_{name.upper().replace('-', '_')}") for name in ("authorization", "x-api-key")
    }
    return {name: str(value) for name, value in found.items() if value is not None}


def _refuse(start_response: StartResponse, status: str, *headers: tuple[str, str]) -> list[bytes]:
    plain = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", "0")]
    start_response(status, [*plain, *headers])
    return [b""]
