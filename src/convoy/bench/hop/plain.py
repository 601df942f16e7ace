"""Send over TCP without any sealing, as the reference for links in the hop bench.

The product has no plaintext mode, so this stream is apart. It carries random bytes
of the bench over loopback, and nothing outside this package imports it; a test enforces that.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from convoy.errors import LinkBroken


class PlainStream:
    """Implement `Stream` over a bare TCP connection. One thread sends and one receives, at most."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self._receiving = threading.Lock()

    def send_all(self, data: bytes | bytearray | memoryview) -> None:
        try:
            with self._sending:
                self._sock.sendall(data)
        except OSError as error:
            raise LinkBroken("the plain connection of the bench broke") from error

    def recv_into(self, buffer: memoryview) -> int:
        try:
            with self._receiving:
                return self._sock.recv_into(buffer)
        except OSError as error:
            raise LinkBroken("the plain connection of the bench broke") from error

    def set_deadline(self, at_s: float | None) -> None:
        self._sock.settimeout(None if at_s is None else max(0.001, at_s - time.monotonic()))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with self._sending, self._receiving:
            self._sock.close()
