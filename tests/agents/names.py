"""A name server that knows no name and writes down every name that it is asked for."""

from __future__ import annotations

import socket
import struct
import threading

# A response without recursion on an error: NXDOMAIN, the name does not exist (RFC 1035, 4.1.1).
_NO_SUCH_NAME = 0x8183
_HEADER_BYTES = 12


class NameServer:
    """Listen on port 53 of loopback until `close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: set[str] = set()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 53))
        self._thread = threading.Thread(target=self._serve, name="names", daemon=True)
        self._thread.start()

    def take(self) -> set[str]:
        """Return the names since the last call, in lower case."""
        with self._lock:
            asked, self._asked = self._asked, set()
            return asked

    def close(self) -> None:
        # A closed socket would leave the thread in `recvfrom`, but a datagram wakes it.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"", ("127.0.0.1", 53))
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            query, client = self._socket.recvfrom(4096)
            if not query:
                return
            name, end = _name_in(query)
            with self._lock:
                self._asked.add(name)
            question = query[_HEADER_BYTES : end + 4]
            header = query[:2] + struct.pack(">HHHHH", _NO_SUCH_NAME, 1, 0, 0, 0)
            self._socket.sendto(header + question, client)


def _name_in(query: bytes) -> tuple[str, int]:
    """Return the name that a query asks for, and the index behind it."""
    labels, at = [], _HEADER_BYTES
    while query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode("ascii", "replace").lower())
        at += 1 + query[at]
    return ".".join(labels), at + 1
