"""What an attacker cuts a connection into, and where the fields of each piece stand: all offsets are here.

Outside TLS he sees records; with the outer layer taken away he sees handshake frames and sealed frames.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from convoy.crypto.cipher import TAG_BYTES
from convoy.wire.frame import HANDSHAKE_MAGIC, HANDSHAKE_PREAMBLE_BYTES, HEADER_BYTES

TLS_HEADER_BYTES = 5
TLS_RECORD_FIELDS = {"type": (0, 8), "version": (8, 24), "length": (24, 40)}
NAME_BYTES = (
    32  # what stands for the outer layer's proof where it was taken away: a certificate's fingerprint
)

# Bits [start, end) of a sealed frame's header.
FRAME_FIELDS = {
    "type": (0, 8),
    "flags": (8, 16),
    "boundary": (16, 32),
    "length": (32, 64),
    "cluster": (64, 128),
    "plan_id": (128, 192),
    "step": (192, 256),
    "sequence": (256, 320),
    "tensor": (320, 352),
    "record": (352, 384),
}
# Where a field ends, or a part of a frame: an attacker may stop a frame at each.
FRAME_BOUNDARIES = (
    0,
    1,
    2,
    4,
    8,
    16,
    24,
    32,
    40,
    44,
    HEADER_BYTES,
    HEADER_BYTES + 1,
    HEADER_BYTES + TAG_BYTES,
)

PREAMBLE_FIELDS = {"magic": (0, 4), "type": (4, 5), "zero": (5, 6), "length": (6, 8)}


def message_1_fields(dialler: str, listener: str, cluster: str) -> dict[str, tuple[int, int]]:
    """Return bytes [start, end) of each field of M1, behind the preamble; docs/protocol.md, section 3."""
    sizes = {
        "version": 2,
        "link id": 16,
        "replaces": 16,
        "initiator": 1 + len(dialler),
        "responder": 1 + len(listener),
        "cluster": 1 + len(cluster),
        "roster epoch": 8,
        "roster digest": 32,
        "x25519 share": 32,
        "kem key": 1184,
        "ciphers": 3,
    }
    return _spans(sizes)


def message_2_fields() -> dict[str, tuple[int, int]]:
    """Return the same for M2."""
    return _spans(
        {
            "version": 2,
            "cipher": 1,
            "roster epoch": 8,
            "roster digest": 32,
            "x25519 share": 32,
            "kem ciphertext": 1088,
            "signature": 64,
            "mac": 32,
        }
    )


def message_3_fields() -> dict[str, tuple[int, int]]:
    """Return the same for M3."""
    return _spans({"signature": 64, "mac": 32})


def _spans(sizes: dict[str, int]) -> dict[str, tuple[int, int]]:
    spans, start = {}, 0
    for name, size in sizes.items():
        spans[name] = (start, start + size)
        start += size
    return spans


Measure = Callable[[bytearray, int], int | None]


@dataclass
class Splitter:
    """Split bytes into whole units as they come. ``measure`` gives the size of the first unit in the buffer,
    or None if that cannot be known yet.
    """

    measure: Measure
    _buffer: bytearray = field(default_factory=bytearray)
    _count: int = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._buffer += data
        while (size := self.measure(self._buffer, self._count)) is not None and len(self._buffer) >= size:
            unit = bytes(self._buffer[:size])
            del self._buffer[:size]
            self._count += 1
            yield unit


def tls_records(buffer: bytearray, _count: int) -> int | None:
    if len(buffer) < TLS_HEADER_BYTES:
        return None
    return TLS_HEADER_BYTES + int.from_bytes(buffer[3:5], "big")


def inner_frames(buffer: bytearray, count: int) -> int | None:
    """Measure the name that stands for TLS, then handshake frames and sealed frames."""
    if count == 0:
        return NAME_BYTES
    if len(buffer) < HANDSHAKE_PREAMBLE_BYTES:
        return None
    if buffer[:4] == HANDSHAKE_MAGIC:
        return HANDSHAKE_PREAMBLE_BYTES + int.from_bytes(buffer[6:8], "big")
    if len(buffer) < HEADER_BYTES:
        return None
    return HEADER_BYTES + int.from_bytes(buffer[4:8], "big")
