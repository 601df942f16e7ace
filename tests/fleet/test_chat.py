"""Reasoning, calls and the details of usage through provider, coordinator and blind proxy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from openai import OpenAI

from support.chat_events import parse_chat_stream
from support.fake_service import FakeEngine
from support.fleet import MODEL
from support.proxied_fleet import WAYS, ProxiedFleet

CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'
CALLING = f"<think>Look.</think>I look.{CALL}"
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
ASK: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 500,
    "messages": [{"role": "user", "content": "When?"}],
    "tools": [CLOCK],
}
CACHED = 7


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxiedFleet]:
    engine = FakeEngine(CALLING)
    engine.cached_tokens = CACHED
    with ExitStack() as stack:
        yield ProxiedFleet(tmp_path_factory.mktemp("fleet"), stack, engine)


def post(fleet: ProxiedFleet, way: str, **more: Any) -> httpx.Response:
    return fleet.ask(way, "/v1/chat/completions", **{**ASK, **more})


def prompt_of(fleet: ProxiedFleet) -> str:
    return bytes(fleet.engine.handles[-1].request.prompt_ids).decode()


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    for choice in answer["choices"]:
        for call in choice["message"].get("tool_calls", ()):
            call["id"] = ""
    return {**answer, "id": "", "created": 0}


@WAYS
def test_a_whole_answer_is_that_of_the_head(fleet: ProxiedFleet, way: str) -> None:
    found = post(fleet, way).json()
    assert without_ids(found) == without_ids(post(fleet, "head").json())
    assert found["choices"][0]["message"]["reasoning_content"] == "Look."
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == CACHED


@WAYS
def test_a_stream_has_the_reasoning_the_call_and_the_counts_of_the_head(
    fleet: ProxiedFleet, way: str
) -> None:
    options = {"include_usage": True}
    chunks = parse_chat_stream(post(fleet, way, stream=True, stream_options=options).text)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Look."
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
    calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    assert calls[0]["function"]["name"] == "clock"
    assert "".join(call["function"]["arguments"] for call in calls) == '{"zone": "UTC"}'
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == CACHED
    assert chunks[-1]["usage"]["completion_tokens"] == len(CALLING)


@WAYS
def test_the_openai_client_sends_a_turn_with_its_reasoning_and_its_call_back(
    fleet: ProxiedFleet, way: str
) -> None:
    with OpenAI(base_url=f"{fleet.urls[way]}/v1", api_key=fleet.fleet.key, max_retries=0) as client:
        create: Any = client.chat.completions.create
        first = create(**ASK).choices[0]
        assert first.finish_reason == "tool_calls"
        (call,) = first.message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "noon"}
        create(**{**ASK, "messages": [*ASK["messages"], first.message.model_dump(), result]})
    prompt = prompt_of(fleet)
    assert "<think>Look.</think>I look." in prompt
    assert f"<call {call.id} clock>" in prompt
    assert f"noon<result of {call.id} clock>" in prompt


@WAYS
def test_the_anthropic_client_sends_thinking_back_and_reads_the_cached_tokens(
    fleet: ProxiedFleet, way: str
) -> None:
    from anthropic import Anthropic

    tool: Any = {"name": "clock", "input_schema": {"type": "object"}}
    turn: Any = {"role": "user", "content": "When?"}
    with Anthropic(base_url=fleet.urls[way], api_key=fleet.fleet.key, max_retries=0) as client:
        create: Any = client.messages.create
        first = create(model=MODEL, max_tokens=500, messages=[turn], tools=[tool])
        assert first.usage.cache_read_input_tokens == CACHED
        thinking, _, call = first.content
        assert thinking.signature
        answered: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "noon"}
        blocks = [block.model_dump(exclude_none=True) for block in first.content]
        turns: Any = [turn, {"role": "assistant", "content": blocks}, {"role": "user", "content": [answered]}]
        create(model=MODEL, max_tokens=500, messages=turns, tools=[tool])
    assert "<think>Look.</think>I look." in prompt_of(fleet)
    assert f"<result of {call.id} clock>" in prompt_of(fleet)
