"""Any body gets an answer or a refusal, never a fault of the server, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.examples import examples
from support.fake_service import Running

PATH = "/v1/responses"
TEXT = st.text(max_size=8)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


def mostly(*values: Any, of: st.SearchStrategy[Any] | None = None) -> st.SearchStrategy[Any]:
    """Return one of ``values`` or a value ``of`` a strategy, and one time in 20 any JSON."""
    likely = st.sampled_from(values) if values else st.nothing()
    likely = likely if of is None else likely | of
    return st.integers(0, 19).flatmap(lambda number: JSON if number == 19 else likely)


PART = st.fixed_dictionaries(
    {"type": mostly("input_text", "output_text", "input_text", "refusal", "input_image"), "text": mostly("x")}
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": mostly("user", "assistant", "developer"),
        "content": mostly("x", of=st.lists(PART, max_size=2)),
    }
)
ITEM = MESSAGE | st.fixed_dictionaries(
    {"call_id": mostly("call_1"), "name": mostly("read"), "arguments": mostly("{}", '{"a":1}', "{")},
    optional={
        "type": mostly("message", "function_call", "function_call_output", "reasoning", "compaction"),
        "role": mostly("user", "assistant", "developer"),
        "content": mostly("x", of=st.lists(PART, max_size=2)),
        "namespace": mostly("disk"),
        "output": mostly("x", of=st.lists(PART, max_size=2)),
        "summary": mostly([], of=st.lists(PART, max_size=2)),
        "encrypted_content": mostly("convoy.AA==", "convoy.aGk="),
    },
)
FUNCTION = st.fixed_dictionaries(
    {"type": mostly("function", "web_search", "custom"), "name": mostly("read", "write", "list")},
    optional={
        "description": mostly("x"),
        "parameters": mostly({"type": "object"}),
        "strict": mostly(True, False),
    },
)
TOOL = FUNCTION | st.fixed_dictionaries(
    {"type": st.just("namespace")},
    optional={"name": mostly("disk"), "tools": mostly([], of=st.lists(FUNCTION, max_size=2))},
)
CHOICE = mostly("auto", "none", "required") | st.fixed_dictionaries(
    {"type": mostly("function", "allowed_tools", "web_search")},
    optional={"name": mostly("read"), "tools": st.lists(FUNCTION, max_size=2), "mode": mostly("required")},
)
BODY = st.fixed_dictionaries(
    {"input": mostly("hi", of=st.lists(mostly(of=ITEM), min_size=1, max_size=4))},
    optional={
        "model": mostly("fake"),
        "instructions": mostly("x"),
        "tools": mostly(None, of=st.lists(mostly(of=TOOL), max_size=3)),
        "tool_choice": CHOICE,
        "parallel_tool_calls": mostly(True, False),
        "text": mostly({"format": {"type": "json_object"}}, {"format": {"type": "text"}}),
        "reasoning": mostly({"effort": "low", "summary": "auto"}, {"summary": "loud"}),
        "max_output_tokens": mostly(1, 5),
        "temperature": mostly(0, 1.5),
        "top_p": mostly(0.5),
        "truncation": mostly("auto", "disabled"),
        "include": mostly(["reasoning.encrypted_content"]),
        "metadata": mostly({"a": "b"}),
        "stream": mostly(True, False),
        "store": mostly(True, False),
        "previous_response_id": mostly(None, "resp_1"),
    },
)


@settings(
    max_examples=examples(300),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(body=mostly(of=BODY))
def test_any_body_is_answered_or_refused(server: Running, http: httpx.Client, body: Any) -> None:
    before = len(server.engine.handles)
    answer = http.post(PATH, json=body)
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        # A refused request never ran.
        assert len(server.engine.handles) == before
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert (
            answer.text.count("event: response.completed")
            + answer.text.count("event: response.incomplete")
            + answer.text.count("event: response.failed")
            == 1
        )
    for handle in server.engine.handles[before:]:
        assert handle.done.wait(10.0)
