"""Relay TCP to a member and hold every byte for a fixed time, both ways: a longer wire, or a cut one.

The relay delays but does not slow down: it reads bytes at once while earlier ones wait, each with its own
time. A link through it is sealed as usual, because the relay cannot read its contents.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time

_PIECE_BYTES = 1 << 18
# Pieces that may wait in one direction.
_MAX_PIECES = 1 << 10
_CONNECT_S = 5.0


class DelayRelay:
    """Listen on a loopback ``address``, and relay connections to ``target`` until `close`.

    A byte leaves ``delay_s`` after it came, or as soon after that as the system wakes a thread.
    """

    def __init__(self, target: tuple[str, int], delay_s: float) -> None:
        self._target = target
        self._delay_s = delay_s
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = self._is_cut = False
        host, port = self._listening.getsockname()[:2]
        self.address: tuple[str, int] = (host, port)
        threading.Thread(target=self._accept, name="delay", daemon=True).start()

    def cut(self) -> None:
        """End every connection and let none through, until `mend`."""
        with self._lock:
            self._is_cut = True
            ended = list(self._open)
        for sock in ended:
            _end(sock)

    def mend(self) -> None:
        """Let new connections pass again."""
        with self._lock:
            self._is_cut = False

    def close(self) -> None:
        """End every connection. A second call does nothing."""
        with self._lock:
            self._closed = True
            ended = list(self._open)
        for sock in (self._listening, *ended):
            _end(sock)
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._join, args=(near,), name="delay", daemon=True).start()

    def _join(self, near: socket.socket) -> None:
        with contextlib.suppress(OSError), near, socket.create_connection(self._target, _CONNECT_S) as far:
            far.settimeout(None)
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                if self._closed or self._is_cut:
                    return
                self._open |= {near, far}
            back = threading.Thread(target=self._carry, args=(far, near), name="delay", daemon=True)
            back.start()
            self._carry(near, far)
            back.join()
            with self._lock:
                self._open -= {near, far}

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        """Relay one direction until its end, which is delayed like everything else."""
        pieces: queue.Queue[tuple[float, bytes]] = queue.Queue(_MAX_PIECES)
        taker = threading.Thread(target=self._take, args=(source, pieces), name="delay", daemon=True)
        taker.start()
        piece, is_open = b" ", True
        while piece:
            due_s, piece = pieces.get()
            if is_open and (early_s := due_s - time.monotonic()) > 0:
                time.sleep(early_s)
            try:
                if is_open:
                    sink.sendall(piece)
            except OSError:
                # The receiver has closed. Keep emptying the queue, so that the taker thread can end.
                is_open = False
                _end(source)
        taker.join()
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def _take(self, source: socket.socket, pieces: queue.Queue[tuple[float, bytes]]) -> None:
        piece = b" "
        while piece:
            try:
                piece = source.recv(_PIECE_BYTES)
            except OSError:
                piece = b""
            pieces.put((time.monotonic() + self._delay_s, piece))


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
