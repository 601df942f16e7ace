"""A TCP relay that keeps what crosses it: the network as an eavesdropper has it."""

from __future__ import annotations

import contextlib
import socket
import threading


class Relay:
    """Passes every connection on to ``target``; ``recorded`` holds one buffer per connection and way."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._socket]
        self.recorded: list[bytearray] = []
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
                record = bytearray()
                self.recorded.append(record)
                threading.Thread(target=_pump, args=(source, sink, record), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket, record: bytearray) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            record += data
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
