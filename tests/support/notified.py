"""A socket in systemd's place, which receives the states that a service announces."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WAIT_S = 240.0


class NotifySocket:
    """Receive datagrams of sd_notify(3)."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self._sock = sock
        self.address = address
        self.received: list[str] = []

    def until(self, word: str) -> list[str]:
        """Return all lines so far once ``word`` is one of them."""
        while word not in self.received:
            self.received += self._sock.recv(4096).decode().splitlines()
        return self.received


@contextmanager
def notify_socket(*, abstract: bool = False) -> Iterator[NotifySocket]:
    # A short folder: the name of such a socket has at most 107 characters.
    with (
        tempfile.TemporaryDirectory(prefix="cv-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock,
    ):
        file = str(Path(folder) / "notify")
        sock.bind(f"\0{file}" if abstract else file)
        sock.settimeout(WAIT_S)
        yield NotifySocket(sock, f"@{file}" if abstract else file)
