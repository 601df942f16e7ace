from __future__ import annotations

import msgspec
import pytest

from convoy.api.refusals import BodyTooLong
from convoy.crypto.sealed.request import MAX_SEALED_BYTES
from convoy.errors import RequestError
from convoy.fleet.consumer_request import read_consumer_request

BODY = b'{"model":"m","messages":[],"x":[1e15, "\\u00e9"]%s}'


def asked(more: bytes = b"", account: str = "ann", cache_key: bytes = b"") -> dict[str, object]:
    found: dict[str, object] = msgspec.json.decode(
        read_consumer_request(BODY % more, "chat", account, {}, cache_key).body
    )
    return found


def test_what_is_passed_on_is_as_it_was_written_and_so_no_longer() -> None:
    assert b'"x":[1e15, "\\u00e9"]' in read_consumer_request(BODY % b"", "chat", "ann", {}).body
    number = b"1e15," * 1_000_000
    assert (
        len(read_consumer_request(BODY % (b',"y":[' + number + b"1]"), "chat", "ann", {}).body)
        < len(number) + 200
    )


def test_a_body_that_no_seal_holds_is_refused_before_any_provider_hears_of_it() -> None:
    with pytest.raises(BodyTooLong):
        asked(b',"y":"' + b"x" * MAX_SEALED_BYTES + b'"')
    with pytest.raises(RequestError):
        read_consumer_request(b'{"model":"m","y":"\xff"}', "chat", "ann", {})


OTHER_LIMITS = ("n_predict", "max_new_tokens", "num_predict", "max_output_tokens")


def test_max_tokens_is_the_only_limit_that_an_engine_is_told() -> None:
    found = asked(b',"n_predict":null,"max_new_tokens":-1,"max_completion_tokens":4')
    assert found["max_tokens"] == 4
    assert not {"max_completion_tokens", *OTHER_LIMITS} & set(found)


@pytest.mark.parametrize("name", OTHER_LIMITS)
def test_another_name_of_max_tokens_is_refused_and_not_left_out(name: str) -> None:
    with pytest.raises(RequestError, match=f"does not support {name}") as caught:
        asked(b',"%s":9999,"max_tokens":4' % name.encode())
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


def test_max_tokens_of_minus_one_is_as_if_there_were_none() -> None:
    assert asked(b',"max_tokens":-1')["max_tokens"] == asked()["max_tokens"]
    assert asked(b',"max_tokens":-1,"max_completion_tokens":7')["max_tokens"] == 7
    with pytest.raises(RequestError, match="max_tokens"):
        asked(b',"max_tokens":-2')


def test_a_byte_order_mark_is_accepted() -> None:
    assert read_consumer_request(b"\xef\xbb\xbf" + BODY % b"", "chat", "ann", {}) == read_consumer_request(
        BODY % b"", "chat", "ann", {}
    )


def test_accounts_have_cache_salts_that_others_cannot_ask_for() -> None:
    ann, bob = asked(cache_key=b"k")["cache_salt"], asked(account="bob", cache_key=b"k")["cache_salt"]
    assert isinstance(ann, str)
    assert len(ann) == 64
    assert ann != bob
    assert asked(cache_key=b"k")["cache_salt"] == ann
    assert asked(cache_key=b"other")["cache_salt"] != ann
    own = b',"cache_salt":"' + ann.encode() + b'"'
    stolen = asked(own, account="bob", cache_key=b"k")["cache_salt"]
    assert stolen not in {ann, bob}
    assert asked(own)["cache_salt"] == ann  # at the provider: as it was sealed
    assert "cache_salt" not in asked()


def test_a_body_of_very_many_lists_is_refused_before_they_are_made() -> None:
    data = b'{"model": "demo", "prompt": [' + b"[]," * 100_001 + b"[]]}"
    with pytest.raises(RequestError, match="more than 100000 lists, objects and fields"):
        read_consumer_request(data, "completion", "account", {})
