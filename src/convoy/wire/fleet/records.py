"""A sealed answer on its way from the coordinator to a proxy: records, each behind its length.

A record is a message as the provider sent it. `Done`, with the billed counts, is followed by `Timed`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from convoy.errors import FrameError, FrameTooLong
from convoy.wire.fleet.messages import (
    MAX_CHUNK_MESSAGE_BYTES,
    Began,
    Chunk,
    Done,
    Failed,
    FleetMessage,
    encode_fleet,
)
from convoy.wire.text import plain_text

_LENGTH_BYTES = 4


class Timed(FleetMessage, frozen=True, tag="Timed"):
    """Report, last of all, the microseconds of each part of the way (coordinator to proxy)."""

    us: Annotated[
        dict[
            Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9_]{1,40}\Z")],
            Annotated[int, msgspec.Meta(ge=0, le=1 << 50)],
        ],
        msgspec.Meta(max_length=32),
    ]


Record = Began | Chunk | Done | Failed | Timed
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def encode_record(record: Record) -> bytes:
    """Return a record: its length as u32 big-endian, then the message."""
    data = encode_fleet(record)
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


class RecordReader:
    """Read the records of one answer from bytes in any division."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Record]:
        """Return the records that are complete now.

        Raises `FrameError` for bytes that are no record; `FrameTooLong`.
        """
        self._rest += data
        found: list[Record] = []
        start = 0
        while len(self._rest) - start >= _LENGTH_BYTES:
            length = int.from_bytes(self._rest[start : start + _LENGTH_BYTES], "big")
            if length > MAX_CHUNK_MESSAGE_BYTES:
                raise FrameTooLong(f"a record of {length} bytes, and the limit is {MAX_CHUNK_MESSAGE_BYTES}")
            end = start + _LENGTH_BYTES + length
            if len(self._rest) < end:
                break
            found.append(_record(bytes(self._rest[start + _LENGTH_BYTES : end])))
            start = end
        del self._rest[:start]
        return found


def _record(data: bytes) -> Record:
    try:
        record = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise FrameError(f"{len(data)} bytes of the coordinator are no record") from None
    if isinstance(record, Failed):
        return msgspec.structs.replace(record, reason=plain_text(record.reason, 500))
    return record
