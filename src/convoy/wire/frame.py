"""The header of a sealed frame and the preamble of a handshake frame, with the limit of each type.

A length is checked here, before any allocation for it. No frame is longer than a record. A longer message
comes as a frame with its size, followed by records. Layout: docs/protocol.md.
"""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

from convoy.crypto.cipher import TAG_BYTES
from convoy.errors import FrameError, FrameTooLong
from convoy.wire.messages.control import FrameRow, FrameType, Sender
from convoy.wire.messages.types import MESSAGE_TYPES

HEADER_BYTES = 48

# A frame with a full record is 131,072 bytes: exactly eight TLS records.
RECORD_BYTES = 128 * 1024 - HEADER_BYTES - TAG_BYTES
CLUSTER_TAG_BYTES = 8
FLAG_LAST = 0x01

HANDSHAKE_MAGIC = b"CNVY"
HANDSHAKE_PREAMBLE_BYTES = 8

# Before authentication, the bytes that one end can make the other read add up to less than 4 KiB.
MAX_HANDSHAKE_BYTES: dict[FrameType, int] = {
    FrameType.OPENING: 64,
    FrameType.HANDSHAKE_1: 3072,
    FrameType.HANDSHAKE_2: 3072,
    FrameType.HANDSHAKE_3: 128,
    FrameType.HANDSHAKE_END: 64,
}

_HEADER = struct.Struct(">BBHI8sQQQII")
_PREAMBLE = struct.Struct(">4sBBH")
_SIZE = struct.Struct(">I")

# The frames that carry a tensor and no message.
TENSOR_ROWS = (
    FrameRow(FrameType.HIDDEN, RECORD_BYTES, Sender.HEAD | Sender.PEER | Sender.PREDECESSOR | Sender.LEADER),
    FrameRow(FrameType.BLOCKS, RECORD_BYTES, Sender.HEAD | Sender.PEER | Sender.LEADER | Sender.FOLLOWER),
    FrameRow(
        FrameType.PARTIAL,
        RECORD_BYTES,
        Sender.HEAD | Sender.PEER | Sender.LEADER | Sender.FOLLOWER | Sender.RANK,
    ),
)
TENSOR_TYPES = frozenset(row.type for row in TENSOR_ROWS)

_ROWS = (*TENSOR_ROWS, *(message.frame for message in MESSAGE_TYPES.values()))
# Limits of whole payloads in bytes, before sealing. Types that are missing here are never sealed.
MAX_PAYLOAD_BYTES: dict[FrameType, int] = {row.type: row.max_bytes for row in sorted(_ROWS)}

_TYPES: dict[int, FrameType] = {int(kind): kind for kind in MAX_PAYLOAD_BYTES}
_HANDSHAKE_TYPES: dict[int, FrameType] = {int(kind): kind for kind in MAX_HANDSHAKE_BYTES}


HeaderFields = tuple[FrameType, int, int, int, bytes, int, int, int, int, int]


class FrameHeader(NamedTuple):
    """Hold the fields that stand in clear before a sealed payload, and are part of its AAD.

    ``length`` counts the sealed payload with its tag. ``boundary`` is the first layer that the tensor
    goes into.
    """

    type: FrameType
    flags: int
    boundary: int
    length: int
    cluster: bytes
    plan_id: int
    step: int
    sequence: int
    tensor: int
    record: int

    @property
    def last(self) -> bool:
        return bool(self.flags & FLAG_LAST)


def frames_from(senders: Sender) -> frozenset[FrameType]:
    """Return the frames that any of these senders may send. Any other frame ends its link undecoded."""
    return frozenset(row.type for row in _ROWS if row.senders & senders)


def cluster_tag(cluster_id: str) -> bytes:
    """Return the first 8 bytes of the cluster id's SHA-256: frames of one cluster never open in another."""
    return hashlib.sha256(b"convoy cluster\0" + cluster_id.encode()).digest()[:CLUSTER_TAG_BYTES]


def check_payload(kind: FrameType, num_bytes: int) -> None:
    """Check a payload's size before sealing. Raises `FrameTooLong` over the limit that every peer
    enforces.
    """
    limit = MAX_PAYLOAD_BYTES[kind]
    if num_bytes > limit:
        raise FrameTooLong(f"a {kind.name} of {num_bytes} bytes is over its limit of {limit}")


def encode_size(num_bytes: int) -> bytes:
    """Return the payload of the first frame of a message that is longer than a record."""
    return _SIZE.pack(num_bytes)


def decode_size(kind: FrameType, data: bytes | bytearray | memoryview) -> int:
    """Return the number of bytes of the message that follows in records.

    Raises `FrameError`, and `FrameTooLong` over its type's limit.
    """
    if len(data) != _SIZE.size:
        raise FrameError(f"a {kind.name} in records begins with {len(data)} bytes, expected {_SIZE.size}")
    num_bytes: int = _SIZE.unpack(data)[0]
    check_payload(kind, num_bytes)
    if num_bytes <= RECORD_BYTES:
        raise FrameError(f"a {kind.name} of {num_bytes} bytes comes in records, but fits in one frame")
    return num_bytes


def encode_header_into(
    buffer: bytearray | memoryview, offset: int, header: FrameHeader | HeaderFields
) -> None:
    """Write HEADER_BYTES at ``offset``.

    ``header`` may be a plain tuple of the fields, which is quicker to make.
    """
    _HEADER.pack_into(buffer, offset, *header)


def decode_header(buffer: bytes | bytearray | memoryview, offset: int = 0) -> FrameHeader:
    """Read and check a header.

    Raises `FrameError`, and `FrameTooLong` if its length is over the limit of the type or of a record.
    """
    number, flags, boundary, length, *rest = _HEADER.unpack_from(buffer, offset)
    kind = _TYPES.get(number)
    if kind is None:
        raise FrameError(f"0x{number:02x} is not the type of a sealed frame")
    if flags & ~FLAG_LAST:
        raise FrameError(f"a {kind.name} has unknown flags 0x{flags:02x}")
    limit = min(MAX_PAYLOAD_BYTES[kind], RECORD_BYTES) + TAG_BYTES
    if length > limit:
        raise FrameTooLong(f"a {kind.name} claims {length} bytes, and its limit is {limit}")
    if length < TAG_BYTES:
        raise FrameError(f"a {kind.name} claims {length} bytes, fewer than its tag of {TAG_BYTES}")
    return FrameHeader(kind, flags, boundary, length, *rest)


def encode_handshake(kind: FrameType, payload: bytes) -> bytes:
    """Return a whole handshake frame: preamble and payload. Raises `FrameTooLong`."""
    _check_handshake(kind, len(payload))
    return _PREAMBLE.pack(HANDSHAKE_MAGIC, kind, 0, len(payload)) + payload


def decode_preamble(data: bytes | bytearray | memoryview) -> tuple[FrameType, int]:
    """Return the type and payload length of a handshake frame.

    Raises `FrameError`; `FrameTooLong` over its limit.
    """
    magic, number, zero, length = _PREAMBLE.unpack_from(data)
    kind = _HANDSHAKE_TYPES.get(number)
    if magic != HANDSHAKE_MAGIC or kind is None or zero != 0:
        raise FrameError("the other end does not speak convoy: no handshake frame came first")
    _check_handshake(kind, length)
    return kind, length


def _check_handshake(kind: FrameType, length: int) -> None:
    limit = MAX_HANDSHAKE_BYTES[kind]
    if length > limit:
        raise FrameTooLong(f"a {kind.name} claims {length} bytes, and its limit is {limit}")
