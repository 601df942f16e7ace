"""Arguments of calls that clients send back: objects, broken ones, and those over a bound."""

from __future__ import annotations

import json

import pytest

from convoy.api.body.arguments import MAX_ARGUMENTS_BYTES, read_arguments
from convoy.errors import RequestError


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ('{"a": 1}', '{"a": 1}'),
        (" {} ", "{}"),
        ("", "{}"),
        ("  ", "{}"),
        ("\n{}", "{}"),
        ('{"a": "\\ud83d\\ude00"}',) * 2,
    ],
)
def test_an_object_is_returned_and_empty_arguments_are_one(given: str, text: str) -> None:
    assert read_arguments(given, "x") == text


@pytest.mark.parametrize(
    "given",
    [
        *('{"a": "\\ud800"}', '{"\\udc00": 1}'),
        *('{"a":', "[1]", "5", "no json", "[" * 5000, '{"a": NaN}', '{"a": ' + "1" * 5000 + "}"),
    ],
)
def test_other_text_is_none(given: str) -> None:
    assert read_arguments(given, "x") is None


@pytest.mark.parametrize(
    "given", [json.dumps({"a": "x" * MAX_ARGUMENTS_BYTES}), '{"a":' + "[" * 70 + "]" * 70 + "}"]
)
def test_arguments_over_a_bound_are_refused(given: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_arguments(given, "x")
    assert caught.value.param == "x"
