"""A proxy on a socket, and a coordinator between it and the real one that can change every answer."""

from __future__ import annotations

import asyncio
import base64
import binascii
import gzip
import hashlib
import json
import threading
import urllib.parse
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from convoy.api.listen.options import ServeOptions
from convoy.api.server import HttpServer, Stop, bind, url_of
from convoy.fleet.proxy.proxy import ProxyOptions
from convoy.fleet.proxy.server import run_proxy
from convoy.fleet.proxy.trust import Trust
from convoy.wire.fleet.records import Record, RecordReader, encode_record
from support.fleet import LOCAL, Running

Leased = Callable[[dict[str, Any]], Any]
Relayed = Callable[[list[Record]], list[Record]]


@contextmanager
def proxy(
    coordinator: str, key: str, trust: Trust, *, heartbeat_s: float = 5.0, **changes: Any
) -> Iterator[str]:
    """Run a proxy until the block ends, and yield its URL."""
    ready, urls, stop = threading.Event(), [], Stop()

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    def run() -> None:
        options = ProxyOptions(trust, **changes)
        served = ServeOptions(port=0, drain_s=5.0, heartbeat_s=heartbeat_s)
        run_proxy(coordinator, key, options, served, on_ready=on_ready, stop=stop)

    running = Running(run, stop.request)
    assert ready.wait(90), running.error
    try:
        yield urls[0]
    finally:
        running.stop()


class HostileCoordinator:
    """Pass requests on to an honest coordinator. ``lease`` and ``records`` change its answers; ``got``
    keeps all input.
    """

    def __init__(self, honest: str) -> None:
        self._honest = honest
        self.lease: Leased = lambda lease: lease
        self.records: Relayed = lambda records: records
        self.sealed_answer: Response | None = None
        self.headers: dict[str, str] = {}
        self.got = b""
        self.posted: list[str] = []
        methods = ["GET", "POST", "DELETE"]
        self.app = Starlette(routes=[Route("/{path:path}", self._any, methods=methods)])

    async def _any(self, request: Request) -> Response:
        body = await request.body()
        self.got += repr(request.headers.raw).encode() + request.url.path.encode() + body
        self.posted.append(f"{request.method} {request.url.path}")
        kept = {"authorization", "content-type", "idempotency-key"}
        headers = {name: value for name, value in request.headers.items() if name in kept}
        path = request.url.path
        is_use = path.startswith("/v1/leases/") and request.method == "POST"
        if is_use and self.sealed_answer is not None:
            return self.sealed_answer
        async with httpx.AsyncClient(base_url=self._honest, trust_env=False, timeout=90) as client:
            answer = await client.request(request.method, path, content=body, headers=headers)
        data = answer.content
        if path == "/v1/leases" and answer.status_code == 200:
            data = msgspec.json.encode(self.lease(answer.json()))
        elif is_use and answer.status_code == 409:
            data = msgspec.json.encode({"reseal": self.lease(answer.json()["reseal"])})
        elif is_use and answer.status_code == 200:
            data = b"".join(encode_record(record) for record in self.records(RecordReader().feed(data)))
        kind = answer.headers["content-type"]
        return Response(data, answer.status_code, {"content-type": kind, **self.headers})


@contextmanager
def hostile_server(coordinator: HostileCoordinator) -> Iterator[str]:
    """Serve the hostile coordinator until the block ends, and yield its URL."""
    listener = bind(LOCAL)
    server = HttpServer(coordinator.app)

    def stop() -> None:
        server.should_exit = True

    running = Running(lambda: asyncio.run(server.serve(sockets=[listener])), stop)
    try:
        yield url_of("127.0.0.1", listener)
    finally:
        running.stop()


def disguises(text: str) -> dict[str, bytes]:
    """Return the encodings by which an eavesdropper would recognise ``text``."""
    data = text.encode()
    found = {
        "utf-8": data,
        "utf-16": text.encode("utf-16-le"),
        "utf-16 the other way": text.encode("utf-16-be"),
        "utf-32": text.encode("utf-32-le"),
        "in JSON": json.dumps(text).strip('"').encode(),
        "in a URL": urllib.parse.quote(text).encode(),
        "in a form": urllib.parse.quote_plus(text).encode(),
        "hex": data.hex().encode(),
        "HEX": data.hex().upper().encode(),
        "quoted-printable": binascii.b2a_qp(data, istext=False).replace(b"=\n", b""),
        "backwards": data[::-1],
        "compressed": zlib.compress(data),
        "gzip": gzip.compress(data, mtime=0)[10:-8],
        "repr": repr(data).encode()[2:-1],
    }
    # In base64 the bytes depend on the position at which the text begins.
    for skipped in range(3):
        padded = base64.b64encode(bytes(skipped) + data)
        found[f"base64 at {skipped}"] = padded[4:-4]
        found[f"base64url at {skipped}"] = base64.urlsafe_b64encode(bytes(skipped) + data)[4:-4]
    for name in ("md5", "sha1", "sha256", "sha512", "blake2b"):
        digest = hashlib.new(name, data).digest()
        found[name] = digest
        found[f"{name} in hex"] = digest.hex().encode()
        found[f"{name} in base64"] = base64.b64encode(digest)[:-2]
    return found


def found_in(capture: bytes, text: str) -> list[str]:
    """Return the names of the encodings in which ``capture`` holds ``text``."""
    return [name for name, data in disguises(text).items() if len(data) >= 6 and data in capture]
