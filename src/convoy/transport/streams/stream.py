"""The stream below a link: it carries bytes in order, or raises an error.

One thread may send while another receives nothing. Once the handshake is over, a link uses each stream in
one direction only, so no stream is ever read and written at once.
"""

from __future__ import annotations

from typing import Protocol


class Stream(Protocol):
    """Carry bytes in order. `tcp.TlsStream` and `convoy.testing.MemoryStream` pass one test suite."""

    def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of ``data``. Raises `LinkBroken` if either end closed the stream, or the deadline
        passed.
        """

    def recv_into(self, buffer: memoryview) -> int:
        """Receive at least one byte into ``buffer``; return 0 once the other end closed. Raises
        `LinkBroken`.
        """

    def set_deadline(self, at_s: float | None) -> None:
        """Set a total deadline (``time.monotonic``) for all later calls.

        With None, sends end after the stall timeout, and receives wait for ever.
        """

    def close(self) -> None:
        """End both directions, and wake every thread that waits on this stream. May be called twice."""


def recv_exactly(stream: Stream, num_bytes: int) -> bytearray:
    """Receive exactly ``num_bytes``, or fewer if the other end closed first.

    For handshakes only: ``num_bytes`` is at most 4 KiB.
    """
    buffer = bytearray(num_bytes)
    view = memoryview(buffer)
    received = 0
    while received < num_bytes:
        got = stream.recv_into(view[received:])
        if got == 0:
            break
        received += got
    view.release()
    del buffer[received:]
    return buffer
