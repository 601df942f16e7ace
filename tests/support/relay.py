"""A TCP relay that keeps all bytes that cross it: an eavesdropper's view of the network."""

from __future__ import annotations

import contextlib
import socket
import threading


class Relay:
    """Pass every connection on to ``target``. ``recorded`` holds one buffer per connection and way."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._socket]
        self.recorded: list[bytearray] = []
        self._lost: set[int] = set()
        host, port = self._socket.getsockname()[:2]
        self.address: tuple[str, int] = (host, port)
        threading.Thread(target=self._accept, daemon=True).start()

    def everything(self) -> bytes:
        return b"\n".join(bytes(part) for part in self.recorded)

    def cut(self, index: int) -> None:
        """End the connection with this index (in order of arrival), both ways."""
        for sock in self._sockets[1 + 2 * index : 3 + 2 * index]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def lose(self, way: int) -> None:
        """Lose all further bytes of this way (an index of ``recorded``).

        No socket notices: the bytes are taken and acknowledged.
        """
        self._lost.add(way)

    def close(self) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._socket.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._sockets += [near, far]
            for source, sink in ((near, far), (far, near)):
                self.recorded.append(bytearray())
                way = len(self.recorded) - 1
                threading.Thread(target=self._pump, args=(source, sink, way), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, way: int) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.recorded[way] += data
                if way not in self._lost:
                    sink.sendall(data)
        with contextlib.suppress(OSError):
            if way not in self._lost:
                sink.shutdown(socket.SHUT_WR)
