"""The recorded first request of each agent, replayed against the API that it speaks.

The recordings keep the structure of a body, the names of tools and the keywords of schemas. Filler words
stand for every other text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.fake_service import REPLY, FakeEngine, Running, serving

NAMES = ("codex", "claude", "opencode", "cline")
# As many bytes as the longest recording, with room for an answer. A token is a byte here.
CONTEXT = 1 << 17


def recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name(f"{name}.json").read_text("utf-8"))
    return found


def tool_names(tools: list[dict[str, Any]]) -> list[str]:
    """Return the names of all functions, also of those in a namespace."""
    names: list[str] = []
    for tool in tools:
        if "tools" in tool:
            names += tool_names(tool["tools"])
        elif tool.get("type", "function") == "function":
            names.append(tool.get("function", tool)["name"])
    return names


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(FakeEngine(), max_context=CONTEXT) as running:
        yield running


def replay(server: Running, request: dict[str, Any], **fields: object) -> httpx.Response:
    body = {**request["body"], **fields}
    return httpx.request(
        request["method"], server.url + request["path"], json=body, headers=request["headers"], timeout=60.0
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_first_request_of_an_agent_is_answered_as_a_stream(name: str, server: Running) -> None:
    answer = replay(server, recorded(name))
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    deltas = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert REPLY in "".join(text_of(event) for event in deltas)


def text_of(event: dict[str, Any]) -> str:
    """Return the text that an event of any of the three APIs adds to the answer."""
    if event.get("type") == "response.output_text.delta":
        return str(event["delta"])
    if event.get("type") == "content_block_delta":
        return str(event["delta"].get("text", ""))
    return "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))


@pytest.mark.parametrize("name", NAMES)
def test_the_model_is_told_of_every_function_of_the_agent(name: str, server: Running) -> None:
    request = recorded(name)
    assert replay(server, request).status_code == 200
    prompt = bytes(server.engine.handles[-1].request.prompt_ids).decode()
    names = tool_names(request["body"]["tools"])
    assert len(names) >= 5
    for function in names:
        assert function in prompt


def test_the_changing_header_of_a_conversation_is_no_part_of_the_prompt(server: Running) -> None:
    request = recorded("claude")
    assert request["body"]["system"][0]["text"].startswith("x-anthropic-billing-header:")
    prompts = []
    for number in (1, 2):
        request["body"]["system"][0]["text"] = f"x-anthropic-billing-header: cc={number};"
        assert replay(server, request).status_code == 200
        prompts.append(server.engine.handles[-1].request.prompt_ids)
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_holds_no_text_of_an_agent(name: str) -> None:
    """Every longer text is filler, but for names, patterns and the words of a schema."""
    for text in texts(recorded(name)["body"]):
        words = text.removeprefix("x-anthropic-billing-header:")
        assert len(words) < 64 or FILLER.startswith(words[: len(FILLER)])


FILLER = "the text of an agent stands here, in filler words of the same length. "


def texts(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for one in value.values():
            yield from texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from texts(one)
    elif isinstance(value, str):
        yield value
