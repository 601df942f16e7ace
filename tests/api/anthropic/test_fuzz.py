"""Any JSON on /v1/messages gets an answer in Anthropic's form, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.anthropic_events import parse_message, parse_stream
from support.examples import examples
from support.fake_service import Running

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
)
KINDS = (
    *("text", "thinking", "tool_use", "tool_result", "redacted_thinking", "image", "document", "compaction"),
    *("server_tool_use", "web_search_tool_result", ""),
)
ids = st.sampled_from(["call_1", "call_2", ""])
blocks = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS) | values},
    optional={
        "text": st.text(max_size=8) | values,
        "thinking": st.text(max_size=8),
        "signature": values,
        "id": ids,
        "name": st.sampled_from(["clock", "moon"]) | values,
        "input": st.dictionaries(st.text(max_size=4), values, max_size=2) | values,
        "tool_use_id": ids,
        "content": st.text(max_size=8) | values,
        "is_error": st.booleans(),
    },
)
contents = st.text(max_size=8) | st.lists(blocks, max_size=4) | values
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]) | st.text(max_size=4), "content": contents}
)
tools = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["custom", "bash_20250124"]) | values,
        "name": st.sampled_from(["clock", "moon"]) | values,
        "input_schema": st.dictionaries(st.text(max_size=4), values, max_size=2) | values,
    },
)
bodies = st.fixed_dictionaries(
    {"messages": st.lists(messages, max_size=4) | values, "max_tokens": st.integers(-1, 8) | values},
    optional={
        "stream": st.booleans() | values,
        "system": contents,
        "tools": st.lists(tools, max_size=3) | values,
        "tool_choice": st.fixed_dictionaries({"type": st.sampled_from(["auto", "any", "tool", "none"])})
        | values,
        "thinking": st.fixed_dictionaries({"type": st.sampled_from(["enabled", "adaptive"])}) | values,
        "output_config": values,
        "stop_sequences": st.lists(st.text(max_size=3), max_size=3) | values,
        "temperature": values,
        "unheard_of": values,
    },
)


@settings(
    max_examples=examples(180), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(bodies)
def test_any_body_gets_an_answer_or_a_refusal_and_ends(
    server: Running, http: httpx.Client, body: dict[str, Any]
) -> None:
    answer = http.post("/v1/messages", json=body)
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code == 200:
        if body.get("stream"):
            assert parse_stream(answer.text)[-1]["type"] == "message_stop"
        else:
            parse_message(answer.text)
    else:
        error = answer.json()
        assert error["type"] == "error"
        assert error["error"]["message"]
    counted = http.post("/v1/messages/count_tokens", json=body)
    assert counted.status_code in (200, 400, 404), counted.text
    assert all(handle.done.wait(10.0) for handle in server.engine.handles)
