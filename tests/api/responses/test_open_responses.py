"""The seven cases of text that Open Responses asks of a server, in our own words, over a real socket.

Its specification asks for more fields than OpenAI's client types demand: `RESOURCE` lists those of a
response.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from convoy.api.listen.options import ServeOptions
from convoy.engine.requests.request import GenerationRequest
from support.fake_service import FakeEngine, Running, serving
from support.strict_types import parse_strictly

PATH = "/v1/responses"
RESOURCE = {
    *(
        "id",
        "object",
        "created_at",
        "completed_at",
        "status",
        "incomplete_details",
        "model",
        "output",
        "error",
    ),
    *(
        "previous_response_id",
        "instructions",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "text",
        "truncation",
    ),
    *("temperature", "top_p", "presence_penalty", "frequency_penalty", "top_logprobs", "reasoning", "usage"),
    *("max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata"),
    *("safety_identifier", "prompt_cache_key"),
}
ARGUMENTS = '{"harbour": "Bergen"}'
TIDE = {
    "type": "function",
    "name": "read_tide",
    "description": "Return the tide of a harbour.",
    "parameters": {"type": "object", "properties": {"harbour": {"type": "string"}}, "required": ["harbour"]},
}


def reply(request: GenerationRequest) -> str:
    """Call the tool if there is one, and otherwise repeat the prompt, so that a test sees the read text."""
    prompt = bytes(request.prompt_ids).decode()
    if prompt.startswith("<tools>"):
        return f'<tool_call>\n{{"name": "read_tide", "arguments": {ARGUMENTS}}}\n</tool_call>'
    return prompt.removesuffix("<assistant>").replace("<", "[").replace(">", "]")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(FakeEngine(reply), ServeOptions(port=0, drain_s=5.0, store_responses=True)) as running:
        yield running


def said(role: str, text: str) -> dict[str, str]:
    return {"type": "message", "role": role, "content": text}


def check(response: dict[str, Any]) -> dict[str, Any]:
    """Return a complete response, once all its fields are there and of their types."""
    assert set(response) >= RESOURCE
    parse_strictly(Response, json.dumps(response))
    assert (response["object"], response["status"], response["error"]) == ("response", "completed", None)
    assert all(isinstance(response[name], float | int) for name in ("temperature", "top_p", "top_logprobs"))
    assert all(item["status"] == "completed" for item in response["output"])
    return response


def whole(http: httpx.Client, *items: dict[str, str], **fields: Any) -> dict[str, Any]:
    answer = http.post(PATH, json={"model": "fake", "input": list(items), **fields})
    assert answer.status_code == 200, answer.text
    return check(answer.json())


def streamed(http: httpx.Client, *items: dict[str, str], **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, of which each is named by its type and numbered."""
    answer = http.post(PATH, json={"model": "fake", "input": list(items), "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    *blocks, end, rest = answer.text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        parse_strictly(ResponseStreamEvent, json.dumps(event))
        assert (name, event["sequence_number"]) == (f"event: {event['type']}", number)
        events.append(event)
    assert events[-1]["type"] == "response.completed"
    check(events[-1]["response"])
    return events


def text_of(response: dict[str, Any]) -> str:
    (item,) = response["output"]
    (part,) = item["content"]
    assert (item["type"], item["role"], part["type"]) == ("message", "assistant", "output_text")
    return str(part["text"])


def test_a_users_message_is_answered_with_text(http: httpx.Client) -> None:
    assert text_of(whole(http, said("user", "Name a river."))) == "[user]Name a river."


def test_a_stream_builds_the_same_response_by_its_events(http: httpx.Client) -> None:
    events = streamed(http, said("user", "Name a river."))
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == text_of(events[-1]["response"]) == "[user]Name a river."
    assert [event["type"].removeprefix("response.") for event in events if "delta" not in event] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]


def test_a_system_message_is_read_before_the_users(http: httpx.Client) -> None:
    answer = whole(http, said("system", "Answer in rhyme."), said("user", "Name a river."))
    assert text_of(answer) == "[system]Answer in rhyme.[user]Name a river."


def test_a_tool_is_called_with_its_arguments(http: httpx.Client) -> None:
    (call,) = whole(http, said("user", "How high is the water?"), tools=[TIDE])["output"]
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "read_tide", ARGUMENTS)
    assert call["id"]
    assert call["call_id"]


def test_a_streamed_call_is_begun_filled_and_ended(http: httpx.Client) -> None:
    events = streamed(http, said("user", "How high is the water?"), tools=[TIDE])
    assert [event["type"].removeprefix("response.") for event in events if "delta" not in event] == [
        *("created", "in_progress", "output_item.added"),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    deltas = [event for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(event["delta"] for event in deltas) == ARGUMENTS
    (added,) = (event["item"] for event in events if event["type"] == "response.output_item.added")
    (done,) = (event["item"] for event in events if event["type"] == "response.output_item.done")
    assert (added["type"], added["arguments"], added["status"]) == ("function_call", "", "in_progress")
    assert done == events[-1]["response"]["output"][0]
    assert {event["item_id"] for event in deltas} == {done["id"]}


def test_a_conversation_is_read_in_its_order(http: httpx.Client) -> None:
    turns = said("user", "I am Ann."), said("assistant", "Hello Ann."), said("user", "Who am I?")
    assert text_of(whole(http, *turns)) == "[user]I am Ann.[assistant]Hello Ann.[user]Who am I?"


def test_a_response_continues_an_earlier_one_by_its_id(http: httpx.Client) -> None:
    first = whole(http, said("user", "I am Ann."))
    second = whole(http, said("user", "Who am I?"), previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    assert text_of(second) == "[user]I am Ann.[assistant][user]I am Ann.[user]Who am I?"
