"""A listener for scrapers: strangers hold no place that a scraper needs, and little memory."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from convoy.cluster.metrics.scrape_listener import ScrapeLimits, ScrapeListener
from support.http_strangers import HalfOpen, read_all, send_until_refused, small_fields

OPENING = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n"
LONG = b"x" * 5_000_000


def _app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    body = LONG if environ["PATH_INFO"] == "/long" else b"convoy_ready 1\n"
    start_response("200 OK", [("Content-Length", str(len(body)))])
    return [body]


@contextmanager
def listening(limits: ScrapeLimits | None = None) -> Iterator[tuple[str, int]]:
    listener = ScrapeListener(("127.0.0.1", 0), _app, limits)
    try:
        yield ("127.0.0.1", listener.port)
    finally:
        listener.close()


def url(address: tuple[str, int], path: str = "/metrics") -> str:
    return f"http://{address[0]}:{address[1]}{path}"


def test_a_scrape_is_answered_whole() -> None:
    with listening() as address:
        assert httpx.get(url(address), timeout=60).text == "convoy_ready 1\n"
        assert httpx.get(url(address, "/long"), timeout=60).content == LONG


def test_half_open_requests_keep_no_scraper_out() -> None:
    limits = ScrapeLimits(max_connections=8, max_connections_per_address=8, request_timeout_s=600)
    with listening(limits) as address, HalfOpen(address, OPENING) as crowd:
        for _ in range(5):
            crowd.open(40)
            assert httpx.get(url(address), timeout=60).status_code == 200
        assert crowd.num_open() <= 8


@pytest.mark.parametrize("parts", [iter(lambda: b"x" * 65536, b""), small_fields()], ids=["value", "fields"])
def test_a_header_without_end_is_refused(parts: Iterator[bytes]) -> None:
    with listening() as address, socket.create_connection(address, timeout=60) as sock:
        sock.sendall(OPENING + b"X-Endless: ")
        assert send_until_refused(sock, parts, 64 * 1024 * 1024) < 64 * 1024 * 1024


def test_a_header_too_long_or_of_too_many_fields_is_refused_by_name() -> None:
    with listening() as address:
        for fields in (b"X-Long: " + b"x" * 33_000 + b"\r\n", b"x-y: z\r\n" * 102):
            with socket.create_connection(address, timeout=60) as sock:
                sock.sendall(OPENING + fields + b"\r\n")
                assert b" 431 " in read_all(sock).partition(b"\r\n")[0]


@pytest.mark.parametrize("said", [b"", OPENING])
def test_a_request_that_does_not_come_ends_its_connection(said: bytes) -> None:
    with (
        listening(ScrapeLimits(request_timeout_s=0.2)) as address,
        socket.create_connection(address, timeout=60) as sock,
    ):
        sock.sendall(said)
        assert read_all(sock) == b""


def test_a_scraper_that_reads_nothing_is_given_up() -> None:
    with (
        listening(ScrapeLimits(request_timeout_s=2.0)) as address,
        socket.create_connection(address, timeout=60) as sock,
    ):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(b"GET /long HTTP/1.1\r\n\r\n")
        assert httpx.get(url(address), timeout=60).status_code == 200


def test_closing_ends_every_connection() -> None:
    with listening() as address:
        sock = socket.create_connection(address, timeout=60)
        assert httpx.get(url(address), timeout=60).status_code == 200
    with sock:
        assert read_all(sock) == b""
