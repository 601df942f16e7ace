"""Send and receive the frames of `wire.front` over one end of a socket pair."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

from convoy.errors import FrameError
from convoy.wire.front import LENGTH, FromEngine, FromFront, check_front_length, encode_front

# How long one send may wait for a process that reads nothing. A busy one pauses for a second at most.
MAX_SEND_S = 30.0
# A `struct timeval`.
_TIMEVAL = struct.Struct("@ll")


class FrontChannel:
    """Hold one end of the socket pair. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket, max_send_s: float = MAX_SEND_S) -> None:
        """Take ``sock``. If the other process reads nothing for ``max_send_s``, a send ends the channel."""
        self._socket = sock
        self._sending = threading.Lock()
        self._stalled = False
        seconds, part = divmod(max_send_s, 1)
        # A timeout of Python's socket would bound the receiving thread too.
        sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(seconds), int(part * 1_000_000))
        )

    @property
    def is_stalled(self) -> bool:
        """Return whether a send ended the channel, because the other process read nothing."""
        return self._stalled

    def send(self, message: FromFront | FromEngine, descriptor: int | None = None) -> None:
        """Send a message, and ``descriptor`` after it. Raises `OSError` if the other end is gone or hangs."""
        frame = encode_front(message)
        with self._sending:
            try:
                self._socket.sendall(frame)
                if descriptor is not None:
                    socket.send_fds(self._socket, [b"\0"], [descriptor])
            except BlockingIOError:
                # A part of the frame may have left, so nothing can follow it.
                self._stalled = True
                self._end()
                raise TimeoutError("the other process reads nothing") from None

    def receive(self) -> bytearray | None:
        """Return the next payload, or None once the other end has gone. Raises `FrameError`."""
        header = self._read(LENGTH.size)
        if header is None:
            return None
        (num_bytes,) = LENGTH.unpack(header)
        check_front_length(num_bytes)
        payload = self._read(num_bytes)
        if payload is None:
            raise FrameError(f"the other process ended within a message of {num_bytes} bytes")
        return payload

    def receive_socket(self) -> socket.socket:
        """Return the socket that follows a message. Raises `FrameError`."""
        _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        if len(descriptors) != 1:
            raise FrameError(f"{len(descriptors)} sockets came, expected 1")
        return socket.socket(fileno=descriptors[0])

    def close(self) -> None:
        """End both directions; a thread that receives gets None."""
        self._end()
        self._socket.close()

    def _end(self) -> None:
        # The other end may have gone already.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self, num_bytes: int) -> bytearray | None:
        """Return exactly ``num_bytes``, or None if the other end closed before the last one.

        Nothing is read ahead, because a socket may follow a message.
        """
        data = bytearray(num_bytes)
        view, done = memoryview(data), 0
        while done < num_bytes:
            try:
                read = self._socket.recv_into(view[done:])
            except OSError:
                return None
            if not read:
                return None
            done += read
        return data
