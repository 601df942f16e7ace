from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.crypto.sealed.answer import ANSWER_NONCE_BYTES, MAX_CHUNK_BYTES, AnswerOpener, AnswerSealer
from convoy.crypto.sealed.padding import pad, unpad
from convoy.crypto.sealed.request import (
    KEY_ID_BYTES,
    PUBLIC_KEY_BYTES,
    RequestFacts,
    RequestKey,
    key_id_of,
    request_hash,
    seal_request,
)
from convoy.errors import SealError

KEY = RequestKey()
FACTS = RequestFacts(
    provider="p1",
    key_id=KEY.key_id,
    model="demo",
    request_id="r1",
    lease=b"lease",
    expires_s=1_800_000_000,
    max_tokens=64,
    kind="chat",
)


def test_a_request_opens_for_the_key_that_it_was_sealed_to() -> None:
    sealed, secret = seal_request(KEY.public, FACTS, b'{"messages":[]}')
    opened = KEY.open(FACTS, sealed)
    assert opened.body == b'{"messages":[]}'
    assert opened.answer_secret == secret
    assert b"messages" not in sealed


@pytest.mark.parametrize(
    "changed",
    [
        replace(FACTS, provider="p2"),
        replace(FACTS, model="other"),
        replace(FACTS, request_id="r2"),
        replace(FACTS, lease=b"leasf"),
        replace(FACTS, expires_s=FACTS.expires_s + 1),
        replace(FACTS, max_tokens=65),
        replace(FACTS, kind="completion"),
        replace(FACTS, provider="p1\x00", lease=b"ease"),
    ],
)
def test_a_request_does_not_open_beside_other_facts(changed: RequestFacts) -> None:
    sealed, _ = seal_request(KEY.public, FACTS, b"{}")
    with pytest.raises(SealError):
        KEY.open(changed, sealed)


def test_a_request_for_another_provider_does_not_open() -> None:
    other = RequestKey()
    sealed, _ = seal_request(KEY.public, FACTS, b"{}")
    with pytest.raises(SealError, match="another key"):
        other.open(FACTS, sealed)
    with pytest.raises(SealError, match="does not open"):
        other.open(replace(FACTS, key_id=other.key_id), sealed)


def test_a_changed_byte_anywhere_is_refused() -> None:
    sealed, _ = seal_request(KEY.public, FACTS, b"{}")
    for index in (0, 31, 1087, 1088, 1119, 1120, len(sealed) - 1):
        broken = bytearray(sealed)
        broken[index] ^= 1
        with pytest.raises(SealError):
            KEY.open(FACTS, bytes(broken))
    for cut in (b"", sealed[:100], sealed[:-1]):
        with pytest.raises(SealError):
            KEY.open(FACTS, cut)


def test_a_key_that_is_none_or_is_named_otherwise_is_refused() -> None:
    with pytest.raises(SealError):
        seal_request(KEY.public[:-1], FACTS, b"{}")
    with pytest.raises(SealError):
        seal_request(RequestKey().public, FACTS, b"{}")
    nonsense = b"\xff" * PUBLIC_KEY_BYTES
    with pytest.raises(SealError):
        seal_request(nonsense, replace(FACTS, key_id=key_id_of(nonsense)), b"{}")


def test_the_length_of_a_sealed_body_says_only_its_size_bucket() -> None:
    lengths = {len(seal_request(KEY.public, FACTS, b"x" * size)[0]) for size in range(0, 900, 50)}
    assert len(lengths) == 1
    assert len(KEY.key_id) == KEY_ID_BYTES


@given(st.binary(max_size=3000), st.sampled_from([256, 1024]))
def test_padding_gives_back_what_it_was_given(data: bytes, least: int) -> None:
    padded = pad(data, least)
    assert unpad(padded) == data
    assert len(padded) <= max(least, 1.5 * (len(data) + 4))


@pytest.mark.parametrize("padded", [b"", b"\x00\x00\x00", b"\x00\x00\x00\x05abcd", b"\x00\x00\x00\x01ab"])
def test_padding_that_is_none_is_refused(padded: bytes) -> None:
    with pytest.raises(SealError):
        unpad(padded)


def answered() -> tuple[AnswerSealer, AnswerOpener]:
    sealed, secret = seal_request(KEY.public, FACTS, b"{}")
    digest = request_hash(FACTS, sealed)
    sealer = AnswerSealer(secret, digest)
    return sealer, AnswerOpener(secret, digest, sealer.nonce)


def test_an_answer_comes_in_order_and_ends_with_its_last_chunk() -> None:
    sealer, opener = answered()
    for text in (b"one", b"two"):
        assert opener.open(sealer.seal(text), last=False) == text
    assert not opener.ended
    assert opener.open(sealer.seal(b"", last=True), last=True) == b""
    assert opener.ended
    with pytest.raises(SealError):
        sealer.seal(b"more")
    with pytest.raises(SealError):
        opener.open(b"", last=False)


@pytest.mark.parametrize("fault", ["left out", "doubled", "cut short", "changed", "of another answer"])
def test_an_answer_that_was_tampered_with_does_not_open(fault: str) -> None:
    sealer, opener = answered()
    first, second = sealer.seal(b"one"), sealer.seal(b"two")
    opener.open(first, last=False)
    sent, last = second, False
    if fault == "left out":
        sent = sealer.seal(b"three")
    elif fault == "doubled":
        sent = first
    elif fault == "cut short":
        last = True  # an inner chunk cannot be given out as the last
    elif fault == "changed":
        sent = bytes([second[0] ^ 1]) + second[1:]
    else:
        other, _ = answered()
        other.seal(b"one")
        sent = other.seal(b"two")
    with pytest.raises(SealError):
        opener.open(sent, last=last)
    with pytest.raises(SealError):  # nothing opens after a failure
        opener.open(second, last=False)


def test_bad_lengths_of_an_answer_are_refused() -> None:
    sealer, opener = answered()
    with pytest.raises(SealError):
        sealer.seal(bytes(MAX_CHUNK_BYTES + 1))
    with pytest.raises(SealError):
        opener.open(bytes(2 * MAX_CHUNK_BYTES + 1), last=False)
    with pytest.raises(SealError):
        AnswerOpener(b"short", b"", bytes(ANSWER_NONCE_BYTES))
