"""A TCP relay at a member's listed address, which becomes a bad wire when a test says so."""

from __future__ import annotations

import contextlib
import socket
import threading
import time


class BadWire:
    """Pass connections to ``address`` on to ``target``. Thread-safe.

    Each direction waits for ``delay_s`` before it passes anything on.
    """

    def __init__(self, address: tuple[str, int], target: tuple[str, int]) -> None:
        self._target = target
        self._listening = socket.create_server(address)
        self._sockets: list[socket.socket] = [self._listening]
        self._num_connections = 0
        self._dead: set[int] = set()
        self._blocked = False
        self.delay_s = 0.0
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def num_connections(self) -> int:
        return self._num_connections

    def go_silent(self, *connections: int) -> None:
        """Take and lose all bytes of these connections, by order of arrival; by default of all so far.

        No socket notices.
        """
        self._dead.update(connections or range(self._num_connections))

    def block(self, blocked: bool) -> None:
        """Set whether new connections lead nowhere too."""
        self._blocked = blocked

    def mend(self) -> None:
        """Pass new connections on as they are. Those that fell silent stay so."""
        self._blocked = False
        self.delay_s = 0.0

    def close(self) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
                far = socket.create_connection(self._target)
            except ConnectionRefusedError:
                near.close()
                continue
            except OSError:
                return
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets += [near, far]
            index = self._num_connections
            if self._blocked:
                self._dead.add(index)
            self._num_connections += 1
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink, index), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, index: int) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self.delay_s:
                    time.sleep(self.delay_s)
                if index not in self._dead:
                    sink.sendall(data)
        with contextlib.suppress(OSError):
            if index not in self._dead:
                sink.shutdown(socket.SHUT_WR)
