"""The rows of the APIs: complete, and without an error of ours for any input."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.api.exchange import encode_event
from convoy.errors import RequestError, Unavailable
from convoy.fleet.answer_text import AnswerText
from convoy.fleet.apis.table import APIS
from convoy.fleet.consumer_request import read_consumer_request
from convoy.fleet.provider.allowed import for_engine
from convoy.wire.fleet.messages import Kind

NAMES = (
    *(
        "model",
        "messages",
        "input",
        "prompt",
        "tokens",
        "tools",
        "tool_choice",
        "text",
        "reasoning",
        "include",
    ),
    *("type", "role", "content", "name", "function", "parameters", "schema", "format", "output", "summary"),
    *("max_tokens", "max_output_tokens", "stream", "stream_options", "n", "system", "thinking", "namespace"),
    *("response", "item", "delta", "error", "choices", "usage", "message", "content_block", "code", "id"),
)
WORDS = st.sampled_from(
    [
        *("function", "namespace", "message", "required", "any", "auto", "user", "error", "$ref", "x"),
        *("response.created", "response.failed", "response.output_item.added", "message_start", "ping"),
    ]
)
LEAVES = st.none() | st.booleans() | st.integers(-3, 1 << 70) | st.floats(allow_nan=False) | WORDS
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6)
KINDS = pytest.mark.parametrize("kind", APIS)


def test_each_kind_of_request_has_one_row_and_one_path() -> None:
    assert set(APIS) == set(get_args(Kind))
    assert len({api.path for api in APIS.values()}) == len(APIS)


def engine_body(kind: Kind, body: dict[str, Any]) -> dict[str, Any] | None:
    """Return the body that an engine gets, or None for one that is refused."""
    try:
        wanted = read_consumer_request(msgspec.json.encode({**body, "model": "m"}), kind, "", {}, b"key")
        found: dict[str, Any] = msgspec.json.decode(for_engine(wanted, shares_cache=False))
    except RequestError:
        return None
    return found


@KINDS
@given(body=OBJECTS)
def test_any_body_reaches_an_engine_or_is_refused_as_the_clients_fault(
    kind: Kind, body: dict[str, Any]
) -> None:
    found = engine_body(kind, body)
    if found is not None:
        assert found["model"] == "m"
        assert found.get("store") in (None, False)


@KINDS
@given(found=OBJECTS)
def test_any_event_of_an_engine_is_read_and_passed_on(kind: Kind, found: dict[str, Any]) -> None:
    data = msgspec.json.encode(found)
    facts = APIS[kind].read(msgspec.json.decode(data))
    assert facts.tokens >= 0
    text = AnswerText(kind)
    text.whole(data)
    assert text.bytes >= 0
    form = APIS[kind].form("m")
    assert form.pass_on(b"data: " + data).endswith(b"\n\n")
    assert form.keep_alive().endswith(b"\n\n")
    assert form.refused(400, data).endswith(b"\n\n")
    assert b"".join(map(encode_event, form.failure(Unavailable("x"))))
