"""Accept HTTP connections: every one has a place before its first byte is read."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial

from convoy.transport.listen.places import ConnectionSlot, ConnectionSlots

# The most accepts in one turn of the loop, so that accepted connections are read before many more are taken.
_ACCEPTS_AT_ONCE = 32
_RETRY_S = 0.05
_FULL = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_log = logging.getLogger(__name__)


class Acceptor:
    """Accept on one listening socket, from construction to `close`, on the event loop's thread.

    asyncio's own server makes its protocol only after a TLS handshake, and accepts without a limit. Here a
    connection has a `ConnectionSlot` from its accept on, with the deadline of its header.
    """

    def __init__(
        self,
        listener: socket.socket,
        places: ConnectionSlots,
        protocol: Callable[[ConnectionSlot], asyncio.Protocol],
        *,
        tls: ssl.SSLContext | None = None,
        handshake_s: float,
    ) -> None:
        self._listener = listener
        self._places = places
        self._protocol = protocol
        self._tls = tls
        self._handshake_s = handshake_s
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._closed = False
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Stop accepting. Open connections live on."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._listener)
        if self._retry is not None:
            self._retry.cancel()
        for task in self._opening:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until no connection is being opened any more."""
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _FULL:
                    _log.warning("cannot accept a connection: %s", error.strerror or error)
                self._pause()
                return
            self._open(sock, address)

    def _pause(self) -> None:
        """Stop accepting for a moment and shed unproven connections, because descriptors ran out."""
        self._places.shed(_ACCEPTS_AT_ONCE)
        # A listener that stays readable would spin the event loop, so stop watching it for a moment.
        self._loop.remove_reader(self._listener)
        self._retry = self._loop.call_later(_RETRY_S, self._loop.add_reader, self._listener, self._accept)

    def _open(self, sock: socket.socket, address: object) -> None:
        sock.setblocking(False)
        if sock.family in {socket.AF_INET, socket.AF_INET6}:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        host = str(address[0]) if isinstance(address, tuple) else ""
        # Until a transport exists, the connection can be cut only by cancelling its task.
        place = self._places.take(host, lambda: None)
        task = self._loop.create_task(self._connect(sock, place))
        place.cut = task.cancel
        self._opening.add(task)
        task.add_done_callback(partial(self._opened, sock, place))

    async def _connect(self, sock: socket.socket, place: ConnectionSlot) -> None:
        handshake_s = None if self._tls is None else self._handshake_s
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._protocol(place), sock, ssl=self._tls, ssl_handshake_timeout=handshake_s
            )
        # The client disconnected, or its TLS handshake failed.
        except OSError:
            place.release()
            sock.close()

    def _opened(self, sock: socket.socket, place: ConnectionSlot, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        # A task that is cancelled before its first step has not closed its socket.
        if task.cancelled():
            place.release()
            sock.close()
