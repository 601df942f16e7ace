"""Clients of an HTTP listener that misbehave, over real sockets; each bounded in bytes and in time."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Iterator

ENDLESS_VALUE = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Endless: "
OPENING = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
PROVIDER = (
    b"GET /provider HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


def address_of(url: str) -> tuple[str, int]:
    host, _, port = url.partition("://")[2].partition("/")[0].rpartition(":")
    return host, int(port)


def small_fields(first: int = 0) -> Iterator[bytes]:
    """Yield header fields without end, about 64 KiB at a time."""
    while True:
        yield b"".join(b"x-%d: y\r\n" % i for i in range(first, first + 4096))
        first += 4096


def send_until_refused(sock: socket.socket, parts: Iterable[bytes], most: int = 8 * 1024 * 1024) -> int:
    """Send ``parts`` until the other side hangs up or ``most`` bytes are sent. Returns how many were."""
    sent = 0
    for part in parts:
        try:
            sock.sendall(part)
        except OSError:
            return sent
        sent += len(part)
        if sent >= most:
            return sent
    return sent


def read_all(sock: socket.socket, timeout_s: float = 60.0) -> bytes:
    """Return what the other side sends until it hangs up. Raises TimeoutError if it does not."""
    sock.settimeout(timeout_s)
    found = bytearray()
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(65536):
            found += part
    return bytes(found)


class HalfOpen:
    """Open many connections that send only a part of a request, as fast as possible."""

    def __init__(self, address: tuple[str, int], said: bytes = OPENING, host: str = "127.0.0.1") -> None:
        self._address = address
        self._said = said
        self._host = host
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> HalfOpen:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in self._sockets:
            sock.close()

    def open(self, count: int, *, hold: int = 10_000) -> None:
        """Open ``count`` more; of all, the newest ``hold`` stay open on this side."""
        for _ in range(count):
            sock = socket.create_connection(self._address, timeout=60, source_address=(self._host, 0))
            with contextlib.suppress(OSError):
                sock.sendall(self._said)
            self._sockets.append(sock)
            if len(self._sockets) > hold:
                self._sockets.pop(0).close()

    def num_open(self) -> int:
        """Return how many connections the other side has not ended."""
        return sum(not _is_over(sock) for sock in self._sockets)


def _is_over(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return not sock.recv(65536)
    except BlockingIOError:
        return False
    except OSError:
        return True
