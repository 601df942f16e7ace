"""Frames of enrolment: lengths are judged by type before a body is read, and cards are exact."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.errors import FrameError, FrameTooLong, Incompatible
from convoy.wire.frame import HANDSHAKE_MAGIC
from convoy.wire.messages.enrolment import (
    MAGIC,
    MAX_BODY_BYTES,
    PREAMBLE_BYTES,
    EnrolmentCard,
    EnrolmentType,
    Refusal,
    decode_card,
    decode_enrolment_preamble,
    decode_refusal,
    encode_card,
    encode_enrolment,
)

CARD = EnrolmentCard("beta", ("192.0.2.8", 7777), bytes(32), b"certificate")


def preamble(kind: int, length: int, *, version: int = 2, zero: int = 0, magic: bytes = MAGIC) -> bytes:
    return magic + version.to_bytes(2, "big") + bytes([kind, zero]) + length.to_bytes(4, "big")


@pytest.mark.parametrize("kind", EnrolmentType)
def test_a_frame_of_each_type_comes_back(kind: EnrolmentType) -> None:
    frame = encode_enrolment(kind, bytes(MAX_BODY_BYTES[kind]))
    assert decode_enrolment_preamble(frame[:PREAMBLE_BYTES]) == (kind, MAX_BODY_BYTES[kind])


@pytest.mark.parametrize("kind", EnrolmentType)
def test_an_oversized_length_of_each_type_is_refused_before_its_body(kind: EnrolmentType) -> None:
    for length in (MAX_BODY_BYTES[kind] + 1, 2**32 - 1):
        with pytest.raises(FrameTooLong, match=f"its limit is {MAX_BODY_BYTES[kind]}"):
            decode_enrolment_preamble(preamble(kind, length))


@pytest.mark.parametrize("kind", EnrolmentType)
def test_a_frame_too_short_for_its_type_is_refused(kind: EnrolmentType) -> None:
    with pytest.raises(FrameError, match="or more"):
        decode_enrolment_preamble(preamble(kind, 0))


def test_what_a_stranger_can_make_a_listener_read_is_under_four_kib() -> None:
    from_newcomer = (EnrolmentType.HELLO, EnrolmentType.PROOF)
    assert sum(PREAMBLE_BYTES + MAX_BODY_BYTES[kind] for kind in from_newcomer) < 4096


@pytest.mark.parametrize(
    "data",
    [
        preamble(0, 32),
        preamble(7, 32),
        preamble(1, 64, zero=1),
        preamble(1, 64, magic=HANDSHAKE_MAGIC),
        preamble(1, 64)[:-1],
        b"GET / HTTP/1",
        b"",
    ],
)
def test_what_is_no_frame_of_enrolment_is_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        decode_enrolment_preamble(data)


def test_another_version_is_named_with_ours() -> None:
    with pytest.raises(Incompatible, match="version 1 of enrolment, and this one 2"):
        decode_enrolment_preamble(preamble(1, 64, version=1))


@given(st.binary(max_size=PREAMBLE_BYTES + 4))
def test_garbage_is_a_frame_error_and_nothing_else(data: bytes) -> None:
    try:
        decode_enrolment_preamble(data)
    except (FrameError, Incompatible):
        return
    assert data.startswith(MAGIC)


def test_a_card_comes_back() -> None:
    assert decode_card(encode_card(CARD)) == CARD


@given(st.binary(max_size=300))
def test_garbage_is_no_card(data: bytes) -> None:
    try:
        card = decode_card(data)
    except FrameError:
        return
    assert encode_card(card) == data


@given(st.integers(0, len(encode_card(CARD)) - 1))
def test_a_card_cut_anywhere_is_refused(end: int) -> None:
    with pytest.raises(FrameError):
        decode_card(encode_card(CARD)[:end])


def test_a_card_with_something_behind_it_is_refused() -> None:
    with pytest.raises(FrameError, match="does not have the parts"):
        decode_card(encode_card(CARD) + bytes(4))


def test_an_unknown_reason_to_refuse_is_refused() -> None:
    assert decode_refusal(bytes([Refusal.CONSUMED])) is Refusal.CONSUMED
    with pytest.raises(FrameError, match="unknown reason 99"):
        decode_refusal(b"\x63")
