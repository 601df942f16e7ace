from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.crypto.cipher import TAG_BYTES
from convoy.errors import FrameError, FrameTooLong
from convoy.wire.frame import (
    HEADER_BYTES,
    MAX_HANDSHAKE_BYTES,
    MAX_PAYLOAD_BYTES,
    RECORD_BYTES,
    FrameHeader,
    check_payload,
    cluster_tag,
    decode_header,
    decode_preamble,
    decode_size,
    encode_handshake,
    encode_header_into,
    encode_size,
)
from convoy.wire.messages.control import FrameType
from support.examples import examples

HEADER = FrameHeader(FrameType.HIDDEN, 1, 12, 100, b"clusters", 3, 4, 5, 0, 7)


def encode(header: FrameHeader) -> bytes:
    buffer = bytearray(HEADER_BYTES)
    encode_header_into(buffer, 0, header)
    return bytes(buffer)


def test_a_header_survives_the_way_there_and_back() -> None:
    assert decode_header(encode(HEADER)) == HEADER


def test_the_header_has_the_bytes_that_the_protocol_page_shows() -> None:
    expected = "2101000c00000064636c75737465727300000000000000030000000000000004000000000000000500000000"
    assert encode(HEADER).hex() == expected + "00000007"


def test_a_full_record_fills_whole_tls_records() -> None:
    assert (HEADER_BYTES + RECORD_BYTES + TAG_BYTES) % 16384 == 0
    assert 64 * 1024 <= RECORD_BYTES <= 256 * 1024


@pytest.mark.parametrize("kind", list(MAX_PAYLOAD_BYTES))
def test_a_length_over_its_types_limit_is_refused(kind: FrameType) -> None:
    limit = min(MAX_PAYLOAD_BYTES[kind], RECORD_BYTES) + TAG_BYTES
    assert decode_header(encode(HEADER._replace(type=kind, length=limit))).length == limit
    for length in (limit + 1, 2**31, 2**32 - 1):
        with pytest.raises(FrameTooLong, match=f"{kind.name} claims {length} bytes"):
            decode_header(encode(HEADER._replace(type=kind, length=length)))


def test_a_message_over_its_limit_is_not_even_sealed() -> None:
    with pytest.raises(FrameTooLong, match="BYE of 1025"):
        check_payload(FrameType.BYE, 1025)


@pytest.mark.parametrize("kind", [kind for kind, limit in MAX_PAYLOAD_BYTES.items() if limit > RECORD_BYTES])
def test_the_size_of_a_message_in_records_is_within_its_limit(kind: FrameType) -> None:
    limit = MAX_PAYLOAD_BYTES[kind]
    for num_bytes in (RECORD_BYTES + 1, limit):
        assert decode_size(kind, encode_size(num_bytes)) == num_bytes
    with pytest.raises(FrameTooLong, match=f"{kind.name} of {limit + 1} bytes"):
        decode_size(kind, encode_size(limit + 1))
    for data in (encode_size(RECORD_BYTES), encode_size(0), b"", bytes(5)):
        with pytest.raises(FrameError):
            decode_size(kind, data)


def test_a_frame_shorter_than_its_tag_is_refused() -> None:
    with pytest.raises(FrameError, match="fewer than its tag"):
        decode_header(encode(HEADER._replace(length=15)))


@pytest.mark.parametrize("number", [0x00, 0x01, 0x02, 0x03, 0x04, 0x0F, 0x3E, 0x40, 0xFF])
def test_a_type_that_is_never_sealed_is_refused(number: int) -> None:
    with pytest.raises(FrameError, match=f"0x{number:02x}"):
        decode_header(bytes([number]) + encode(HEADER)[1:])


@pytest.mark.parametrize("flags", [0x02, 0x80, 0xFF])
def test_an_unknown_flag_is_refused(flags: int) -> None:
    with pytest.raises(FrameError, match="unknown flags"):
        decode_header(encode(HEADER._replace(flags=flags)))


def test_clusters_have_different_tags() -> None:
    assert cluster_tag("home") != cluster_tag("away")


@pytest.mark.parametrize("kind", list(MAX_HANDSHAKE_BYTES))
def test_a_handshake_length_over_its_limit_is_refused(kind: FrameType) -> None:
    limit = MAX_HANDSHAKE_BYTES[kind]
    assert decode_preamble(encode_handshake(kind, bytes(limit))) == (kind, limit)
    with pytest.raises(FrameTooLong):
        decode_preamble(struct.pack(">4sBBH", b"CNVY", kind, 0, limit + 1))


def test_all_that_a_stranger_can_send_is_under_4_kib() -> None:
    to_listener = (FrameType.OPENING, FrameType.OPENING, FrameType.HANDSHAKE_1, FrameType.HANDSHAKE_3)
    assert sum(8 + MAX_HANDSHAKE_BYTES[kind] for kind in to_listener) <= 4096


@settings(max_examples=examples(200), deadline=None)
@given(st.binary(min_size=8, max_size=HEADER_BYTES))
def test_garbage_is_never_more_than_a_frame_error(garbage: bytes) -> None:
    with pytest.raises(FrameError):
        decode_preamble(garbage)
    try:
        header = decode_header(garbage.ljust(HEADER_BYTES, b"\0"))
    except FrameError:
        return
    assert header.length <= min(MAX_PAYLOAD_BYTES[header.type], RECORD_BYTES) + TAG_BYTES
