"""Encode and decode tokens: the values that come back, the refusals, and errors with both clocks."""

from __future__ import annotations

import base64
import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.errors import InviteError
from convoy.trust.invite import MAX_ADDRESSES, MAX_LIFETIME_S, Token, decode_token

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True)
HOSTS = st.one_of(
    st.ip_addresses().map(str),
    st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?(\.[a-z]{2,8})?", fullmatch=True),
)
TOKENS = st.builds(
    Token,
    NAMES,
    st.binary(min_size=32, max_size=32),
    st.binary(min_size=32, max_size=32),
    st.lists(st.tuples(HOSTS, st.integers(1, 65535)), min_size=1, max_size=MAX_ADDRESSES).map(tuple),
    st.integers(MAX_LIFETIME_S, 2**33),
    st.integers(1, MAX_LIFETIME_S),
    st.binary(min_size=16, max_size=16),
)
TOKEN = Token("home", bytes(32), bytes(range(32)), (("192.0.2.1", 4000),), 1_800_000_000, 600, b"s" * 16)


def at(seconds: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


@given(TOKENS)
def test_a_token_comes_back_and_is_one_word(token: Token) -> None:
    text = token.encode()
    assert decode_token(text) == token
    assert text.isalnum()
    assert text == text.lower()


@given(TOKENS, st.data())
def test_a_changed_letter_is_noticed(token: Token, data: st.DataObject) -> None:
    text = token.encode()
    place = data.draw(st.integers(0, len(text) - 1))
    letter = data.draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz0123456789-_ é".replace(text[place], "")))
    with pytest.raises(InviteError):
        decode_token(text[:place] + letter + text[place + 1 :])


@given(TOKENS, st.data())
def test_a_token_cut_off_is_noticed(token: Token, data: st.DataObject) -> None:
    text = token.encode()
    with pytest.raises(InviteError):
        decode_token(text[: data.draw(st.integers(0, len(text) - 1))])


@given(st.text(max_size=400))
def test_garbage_is_an_invite_error_and_nothing_else(text: str) -> None:
    for tried in (text, f"convoy1{text}"):
        with pytest.raises(InviteError):
            decode_token(tried)


@given(st.binary(max_size=300))
def test_bytes_with_a_right_checksum_still_have_to_make_sense(content: bytes) -> None:
    from convoy.trust.invite import token_checksum

    digits = base64.b32encode(content + token_checksum(content)).decode().rstrip("=").lower()
    try:
        token = decode_token(f"convoy1{digits}")
    except InviteError:
        return
    assert token.encode() == f"convoy1{digits}"


def test_a_line_that_was_wrapped_or_capitalised_is_read() -> None:
    text = TOKEN.encode()
    assert decode_token(f"  {text[:50]}\n  {text[50:90].upper()}\r\n{text[90:]}\n") == TOKEN


def test_an_endless_line_is_refused() -> None:
    with pytest.raises(InviteError, match="longer than 4096"):
        decode_token("convoy1" + "a" * 100_000)


def test_another_version_is_refused_by_name() -> None:
    with pytest.raises(InviteError, match="does not begin with convoy1"):
        decode_token(TOKEN.encode().replace("convoy1", "convoy2"))


def test_the_secret_is_in_no_repr_and_no_id() -> None:
    assert TOKEN.secret.hex() not in repr(TOKEN) + TOKEN.id
    assert "ssss" not in repr(TOKEN)
    assert Token("home", bytes(32), bytes(32), (("a", 1),), 10**9, 600, bytes(16)).id != TOKEN.id


def test_an_expired_token_says_both_times() -> None:
    TOKEN.require_usable(at(1_800_000_000 - 1))
    with pytest.raises(
        InviteError, match=r"expired at 2027-01-15 08:00:00 UTC, and it is 2027-01-15 08:00:07"
    ):
        TOKEN.require_usable(at(1_800_000_007))


def test_a_token_from_the_future_says_that_the_clocks_differ() -> None:
    TOKEN.require_usable(at(1_800_000_000 - 600 - 120))
    with pytest.raises(InviteError, match=r"made at 2027-01-15 07:50:00 UTC, and it is .*clocks") as error:
        TOKEN.require_usable(at(1_800_000_000 - 3600))
    assert error.value.hint is not None
    assert "clock" in error.value.hint


@pytest.mark.parametrize(
    "change",
    [
        {"cluster_id": "no spaces"},
        {"addresses": ()},
        {"addresses": (("192.0.2.1", 1),) * (MAX_ADDRESSES + 1)},
        {"addresses": (("192.0.2.1", 0),)},
        {"addresses": (("bad host", 1),)},
        {"secret": b"short"},
        {"fingerprint": b""},
        {"lifetime_s": 0},
        {"lifetime_s": MAX_LIFETIME_S + 1},
        {"expires": 5},
    ],
)
def test_a_token_that_makes_no_sense_is_not_made(change: dict[str, object]) -> None:
    values = {name: getattr(TOKEN, name) for name in Token.__slots__}
    with pytest.raises(InviteError):
        Token(**{**values, **change})
