"""What a link needs of the thing below it: bytes in order, or an error; one thread may send while another
receives nothing.

A link uses each stream in one direction once the handshake is over, so no stream is ever read and written at
once.
"""

from __future__ import annotations

from typing import Protocol


class Stream(Protocol):
    """A connection that carries bytes in order. `tcp.TlsStream` and `memory.MemoryStream` pass one suite."""

    def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of it. Raises `LinkBroken` if the stream ended here or there, or the deadline passed."""

    def recv_into(self, buffer: memoryview) -> int:
        """Receive at least one byte into ``buffer``; 0 once the other end closed. Raises `LinkBroken`."""

    def set_deadline(self, at_s: float | None) -> None:
        """A total deadline (``time.monotonic``) for all later calls; None: sends stall out, receives wait for
        ever.
        """

    def close(self) -> None:
        """End both directions and wake whoever waits on this stream, in any thread. Twice is allowed."""


def recv_exactly(stream: Stream, num_bytes: int) -> bytearray:
    """Exactly ``num_bytes``, or fewer if the other end closed first.

    For handshakes: ``num_bytes`` is at most 4 KiB.
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
