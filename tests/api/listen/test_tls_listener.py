"""A TLS listener: an endless handshake holds a place no longer than a header, and blocks no other client."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from starlette.types import Receive, Scope, Send

from convoy.api.listen.http_limits import HttpLimits
from convoy.api.listen.options import ServeOptions
from convoy.api.server import HttpServer, bind
from convoy.crypto.identity import Identity
from support.http_strangers import HalfOpen, read_all

HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextmanager
def listening(folder: Path, limits: HttpLimits) -> Iterator[int]:
    """Yield its port."""
    Identity.generate().save(folder)
    made = threading.Event()
    servers: list[HttpServer] = []

    async def serve() -> None:
        server = HttpServer(_app, tls=(str(folder / "tls.crt"), str(folder / "tls.key")), limits=limits)
        servers.append(server)
        made.set()
        await server.serve(sockets=[listener])

    with bind(ServeOptions(port=0)) as listener:
        port: int = listener.getsockname()[1]
        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        assert made.wait(60)
        try:
            yield port
        finally:
            servers[0].should_exit = True
            thread.join(60)
            assert not thread.is_alive()


def ask(port: int) -> httpx.Response:
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_mode = ssl.CERT_NONE  # what the certificate says is another test's
    with httpx.Client(verify=trusting, trust_env=False, timeout=60) as client:
        return client.get(f"https://127.0.0.1:{port}/")


def test_a_handshake_that_never_ends_is_over_with_its_header(tmp_path: Path) -> None:
    with listening(tmp_path, HttpLimits(header_timeout_s=0.3)) as port:
        for said in (b"", HELLO):
            with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
                sock.sendall(said)
                read_all(sock)  # until it ends


def test_half_done_handshakes_keep_nobody_out(tmp_path: Path) -> None:
    limits = HttpLimits(header_timeout_s=600, max_unproven=8, max_unproven_per_address=8)
    with listening(tmp_path, limits) as port, HalfOpen(("127.0.0.1", port), HELLO) as crowd:
        for _ in range(3):
            crowd.open(40)
            assert ask(port).text == "ok"
        assert crowd.num_open() <= 8


def test_what_is_no_tls_is_closed_and_frees_its_place(tmp_path: Path) -> None:
    with listening(tmp_path, HttpLimits(header_timeout_s=600)) as port:
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
                sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
                read_all(sock)
        assert ask(port).text == "ok"
