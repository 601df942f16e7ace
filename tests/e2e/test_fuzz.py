"""Any body on any endpoint of a split model is answered or refused, and every block comes back.

The fuzzes in `tests/api` look at each API's own shapes, with an engine that answers at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import convoy.testing
from support.examples import examples

TEXT = st.text(max_size=6)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


def mostly(*values: Any, of: st.SearchStrategy[Any] | None = None) -> st.SearchStrategy[Any]:
    """Return one of ``values`` or a value ``of`` a strategy, and one time in 20 any JSON."""
    likely = st.sampled_from(values) if values else st.nothing()
    likely = likely if of is None else likely | of
    return st.integers(0, 19).flatmap(lambda number: JSON if number == 19 else likely)


SCHEMA = mostly(
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "string", "enum": ["x", "</parameter>"]},
    {"type": "object", "dependentSchemas": {}},
)
PART = st.fixed_dictionaries(
    {"type": mostly("text", "input_text", "image_url"), "text": mostly("x", "<think>")}
)
CALL = st.fixed_dictionaries(
    {
        "id": mostly("c1", "c2"),
        "type": mostly("function"),
        "function": st.fixed_dictionaries(
            {"name": mostly("read"), "arguments": mostly("{}", '{"a": 1}', "{")}
        ),
    }
)
BLOCK = st.fixed_dictionaries(
    {"type": mostly("text", "thinking", "tool_use", "tool_result", "image")},
    optional={
        "text": mostly("x"),
        "thinking": mostly("hm"),
        "id": mostly("c1"),
        "name": mostly("read"),
        "input": mostly({"a": 1}),
        "tool_use_id": mostly("c1"),
        "content": mostly("x"),
    },
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": mostly(*["user"] * 5, "assistant", "system", "developer", "tool"),
        "content": mostly("hi", "<|im_end|>") | mostly("hi", None, of=st.lists(PART | BLOCK, max_size=2)),
    },
    optional={
        "tool_calls": mostly(of=st.lists(CALL, max_size=2)),
        "tool_call_id": mostly("c1"),
        "reasoning_content": mostly("hm"),
        "name": mostly("ann"),
    },
)
ITEM = MESSAGE | st.fixed_dictionaries(
    {"type": mostly("function_call", "function_call_output", "reasoning", "item_reference", "compaction")},
    optional={
        "id": mostly("msg_1"),
        "call_id": mostly("c1"),
        "name": mostly("read"),
        "arguments": mostly("{}", "{"),
        "output": mostly("x"),
        "summary": mostly([]),
    },
)
FUNCTION = st.fixed_dictionaries(
    {"name": mostly("read", "write")}, optional={"parameters": SCHEMA, "strict": mostly(True)}
)
TOOL = st.fixed_dictionaries(
    {"type": mostly("function", "custom"), "function": FUNCTION}
) | st.fixed_dictionaries(
    {"type": mostly("function", "custom"), "name": mostly("read")},
    optional={"parameters": SCHEMA, "input_schema": SCHEMA},
)
CHOICE = mostly(
    "auto", "none", "required", {"type": "any"}, {"type": "function", "function": {"name": "read"}}
)
COMMON: dict[str, st.SearchStrategy[Any]] = {
    "model": mostly("synthetic:agent"),
    "tools": mostly(of=st.lists(TOOL, max_size=2)),
    "tool_choice": CHOICE,
    "stream": mostly(True, False),
    "temperature": mostly(0, 1),
    "stop": mostly("a", ["b"]),
    "reasoning_effort": mostly("low"),
    "response_format": mostly(
        {"type": "json_object"},
        of=st.fixed_dictionaries(
            {"type": st.just("json_schema"), "json_schema": st.fixed_dictionaries({"schema": SCHEMA})}
        ),
    ),
    "guided_regex": mostly("[ab]+", "("),
    "grammar": mostly('root ::= "a"', "root ::="),
    "logprobs": mostly(True, 1),
    "n": mostly(1, 2),
    "seed": mostly(1),
    "system": mostly("x", of=st.lists(BLOCK, max_size=2)),
    "thinking": mostly({"type": "enabled"}),
    "instructions": mostly("x"),
    "text": mostly({"format": {"type": "json_object"}}),
    "include": mostly(["reasoning.encrypted_content"]),
    "truncation": mostly("auto"),
    "continue_final_message": mostly(True, False),
    "add_generation_prompt": mostly(True, False),
    "return_token_strs": mostly(True),
    "echo": mostly(True),
}
MESSAGES = {"messages": mostly(of=st.lists(MESSAGE, max_size=4))}
# What each path needs, the fields that suit it, and its name for the most tokens of an answer.
PATHS: dict[str, tuple[dict[str, st.SearchStrategy[Any]], str, str]] = {
    "/v1/chat/completions": (
        MESSAGES,
        "model tools tool_choice stream temperature stop reasoning_effort response_format guided_regex "
        "grammar logprobs n seed continue_final_message add_generation_prompt",
        "max_tokens",
    ),
    "/v1/completions": (
        {"prompt": mostly("hi", [1, 2], ["a", "b"], [-1], "")},
        "model stream temperature stop response_format guided_regex grammar logprobs n seed echo",
        "max_tokens",
    ),
    "/v1/messages": (MESSAGES, "model tools tool_choice stream temperature system thinking", "max_tokens"),
    "/v1/messages/count_tokens": (MESSAGES, "model tools tool_choice system thinking", "max_tokens"),
    "/v1/responses": (
        {"input": mostly("hi", of=st.lists(ITEM, max_size=4))},
        "model tools tool_choice stream temperature instructions text include truncation",
        "max_output_tokens",
    ),
    "/tokenize": (
        MESSAGES,
        "model tools reasoning_effort continue_final_message add_generation_prompt return_token_strs",
        "max_tokens",
    ),
    "/detokenize": ({"tokens": mostly([1, 2], [-1], [10**9], [])}, "model", "max_tokens"),
}
ENDS = ("data: [DONE]", "message_stop", "response.failed", 'data: {"error"')


def body_of(path: str) -> st.SearchStrategy[dict[str, Any]]:
    needed, others, _ = PATHS[path]
    body = st.fixed_dictionaries(needed, optional={name: COMMON[name] for name in others.split()})
    return body | st.fixed_dictionaries({"prompt": mostly("hi")}) if path == "/tokenize" else body


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with (
        convoy.testing.serve("synthetic:agent", members=2) as server,
        httpx.Client(base_url=server.url.removesuffix("/v1"), timeout=60.0) as client,
    ):
        yield client
        # No request is left, so nothing holds a block.
        deadline_s = time.monotonic() + 20.0
        status: dict[str, Any] = {}
        while time.monotonic() < deadline_s:
            status = client.get("/status").json()
            if not status["running"] and status["free_blocks"] == status["num_blocks"]:
                return
        raise AssertionError(status)


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_body_is_answered_or_refused(http: httpx.Client, path: str, data: st.DataObject) -> None:
    body = {**data.draw(body_of(path)), PATHS[path][2]: 3}
    answer = http.post(path, json=body)
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        last = answer.text.rstrip().rsplit("\n\n", 1)[-1]
        assert any(end in last for end in ENDS), last
    else:
        assert isinstance(answer.json(), dict)
