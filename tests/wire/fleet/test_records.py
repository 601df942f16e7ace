"""Records of a sealed answer: each behind its length, from bytes in any division."""

from __future__ import annotations

import msgspec
import pytest

from convoy.errors import FrameError, FrameTooLong
from convoy.wire.fleet.messages import MAX_CHUNK_MESSAGE_BYTES, Began, Chunk, Done, Failed
from convoy.wire.fleet.records import Record, RecordReader, Timed, encode_record
from support.sample_values import sample

RECORDS: list[Record] = [sample(Began), sample(Chunk), sample(Done), Timed({"total_e2e": 7})]


@pytest.mark.parametrize("size", [1, 3, 7, 1 << 20])
def test_records_are_read_from_pieces_of_any_size(size: int) -> None:
    data = b"".join(map(encode_record, RECORDS))
    reader, found = RecordReader(), []
    for start in range(0, len(data), size):
        found += reader.feed(data[start : start + size])
    assert found == RECORDS


def test_an_unfinished_record_is_none_yet() -> None:
    data = encode_record(RECORDS[0])
    reader = RecordReader()
    assert reader.feed(data[:-1]) == []
    assert reader.feed(data[-1:]) == RECORDS[:1]


def test_a_length_over_the_limit_is_refused_before_its_bytes_come() -> None:
    with pytest.raises(FrameTooLong, match=f"the limit is {MAX_CHUNK_MESSAGE_BYTES}"):
        RecordReader().feed((MAX_CHUNK_MESSAGE_BYTES + 1).to_bytes(4, "big"))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91\xa5Hello"])
def test_bytes_that_are_no_record_are_refused(data: bytes) -> None:
    with pytest.raises(FrameError, match="are no record"):
        RecordReader().feed(len(data).to_bytes(4, "big") + data)


def test_a_reason_is_plain_text() -> None:
    said = msgspec.structs.replace(sample(Failed), reason="red \x1b[31m")
    (found,) = RecordReader().feed(encode_record(said))
    assert isinstance(found, Failed)
    assert "\x1b" not in found.reason
    assert found.reason.startswith("red ")
