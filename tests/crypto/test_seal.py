from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.crypto.cipher import TAG_BYTES, Cipher
from convoy.crypto.seal import MAX_SEQUENCE, Opener, Sealer, SealLimits
from convoy.errors import SealError

SECRET = bytes(range(32))
CIPHERS = list(Cipher)


def seal(sealer: Sealer, header: bytes, text: bytes) -> bytes:
    out = bytearray(len(text) + TAG_BYTES)
    sealer.seal_into(header, text, memoryview(out))
    return bytes(out)


def open_(opener: Opener, sequence: int, header: bytes, sealed: bytes) -> bytes:
    out = bytearray(len(sealed) - TAG_BYTES)
    opener.open_into(sequence, header, sealed, memoryview(out))
    return bytes(out)


@pytest.mark.parametrize("cipher", CIPHERS)
def test_what_is_sealed_opens_in_order(cipher: Cipher) -> None:
    sealer, opener = Sealer(SECRET, cipher), Opener(SECRET, cipher)
    for index, text in enumerate([b"", b"one", b"two" * 1000]):
        assert open_(opener, index, b"header", seal(sealer, b"header", text)) == text


@pytest.mark.parametrize("cipher", CIPHERS)
def test_equal_texts_never_seal_alike(cipher: Cipher) -> None:
    sealer = Sealer(SECRET, cipher)
    assert len({seal(sealer, b"", bytes(64)) for _ in range(100)}) == 100


def test_a_replayed_frame_is_refused() -> None:
    sealer, opener = Sealer(SECRET, Cipher.AES_256_GCM), Opener(SECRET, Cipher.AES_256_GCM)
    sealed = seal(sealer, b"h", b"text")
    open_(opener, 0, b"h", sealed)
    with pytest.raises(SealError, match="frame 0 came where 1 was expected"):
        open_(opener, 0, b"h", sealed)


def test_a_replayed_frame_under_a_new_number_is_refused() -> None:
    sealer, opener = Sealer(SECRET, Cipher.AES_256_GCM), Opener(SECRET, Cipher.AES_256_GCM)
    sealed = seal(sealer, b"h", b"text")
    open_(opener, 0, b"h", sealed)
    with pytest.raises(SealError, match="does not open"):
        open_(opener, 1, b"h", sealed)


def test_frames_out_of_order_are_refused() -> None:
    sealer, opener = Sealer(SECRET, Cipher.AES_256_GCM), Opener(SECRET, Cipher.AES_256_GCM)
    seal(sealer, b"h", b"first")
    second = seal(sealer, b"h", b"second")
    with pytest.raises(SealError, match="out of order"):
        open_(opener, 1, b"h", second)


def test_nothing_opens_after_a_failure() -> None:
    sealer, opener = Sealer(SECRET, Cipher.AES_256_GCM), Opener(SECRET, Cipher.AES_256_GCM)
    sealed = seal(sealer, b"h", b"text")
    with pytest.raises(SealError):
        open_(opener, 0, b"other", sealed)
    with pytest.raises(SealError, match="failed before"):
        open_(opener, 0, b"h", sealed)


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=1, max_size=64), st.binary(max_size=200), st.data())
def test_any_flipped_bit_of_header_or_payload_is_refused(
    header: bytes, text: bytes, data: st.DataObject
) -> None:
    sealed = seal(Sealer(SECRET, Cipher.AES_256_GCM), header, text)
    whole = bytearray(header + sealed)
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    whole[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(SealError):
        open_(Opener(SECRET, Cipher.AES_256_GCM), 0, bytes(whole[: len(header)]), bytes(whole[len(header) :]))


@pytest.mark.parametrize("limits", [SealLimits(max_records=3), SealLimits(max_bytes=100)])
@pytest.mark.parametrize("cipher", CIPHERS)
def test_both_ends_turn_the_ratchet_at_the_same_frame(cipher: Cipher, limits: SealLimits) -> None:
    sealer, opener = Sealer(SECRET, cipher, limits), Opener(SECRET, cipher, limits)
    for index in range(50):
        assert open_(opener, index, b"h", seal(sealer, b"h", bytes(index))) == bytes(index)


def test_an_old_key_opens_nothing_after_the_ratchet() -> None:
    sealer = Sealer(SECRET, Cipher.AES_256_GCM, SealLimits(max_records=1))
    behind = Opener(SECRET, Cipher.AES_256_GCM)
    open_(behind, 0, b"h", seal(sealer, b"h", b"a"))
    with pytest.raises(SealError, match="does not open"):
        open_(behind, 1, b"h", seal(sealer, b"h", b"b"))


def test_a_failed_frame_does_not_turn_the_ratchet() -> None:
    opener = Opener(SECRET, Cipher.AES_256_GCM, SealLimits(max_records=1))
    before = opener.turn
    with pytest.raises(SealError):
        open_(opener, 0, b"h", bytes(32))
    assert opener.turn == before
    assert opener.sequence == 0


def test_the_counter_ends_before_it_repeats() -> None:
    sealer = Sealer(SECRET, Cipher.AES_256_GCM)
    sealer.sequence = MAX_SEQUENCE
    with pytest.raises(SealError, match="used up"):
        seal(sealer, b"h", b"text")


def test_a_number_is_spent_even_if_sealing_fails() -> None:
    sealer = Sealer(SECRET, Cipher.AES_256_GCM)
    with pytest.raises(ValueError, match="buffer"):
        sealer.seal_into(b"h", b"text", memoryview(bytearray(3)))
    assert sealer.sequence == 1


def test_the_key_limits_are_those_of_the_protocol_page() -> None:
    assert SealLimits() == SealLimits(max_records=2**22, max_bytes=2**34)


@pytest.mark.parametrize("cipher", CIPHERS)
def test_the_ratchet_turns_at_the_frame_that_reaches_the_bytes_and_counts_anew(cipher: Cipher) -> None:
    # Frames of 40 sealed bytes: the third reaches 120, and then the sixth does.
    limits = SealLimits(max_bytes=120)
    sealer, opener = Sealer(SECRET, cipher, limits), Opener(SECRET, cipher, limits)
    turns = []
    for index in range(7):
        open_(opener, index, b"h", seal(sealer, b"h", bytes(40 - TAG_BYTES)))
        assert sealer.turn == opener.turn
        turns.append(sealer.turn)
    assert turns == [0, 0, 1, 1, 1, 2, 2]


def test_the_ratchet_turns_at_the_frame_that_reaches_the_records() -> None:
    sealer = Sealer(SECRET, Cipher.AES_256_GCM, SealLimits(max_records=3))
    turns = []
    for _ in range(7):
        seal(sealer, b"h", b"")
        turns.append(sealer.turn)
    assert turns == [0, 0, 1, 1, 1, 2, 2]
