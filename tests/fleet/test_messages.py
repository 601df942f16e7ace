"""The Messages API through provider, coordinator and blind proxy, with a head's own HTTP server behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from convoy.errors import StageLost
from support.anthropic_events import blocks_of, parse_message, parse_stream
from support.fake_service import FakeEngine
from support.fleet import MODEL
from support.proxied_fleet import WAYS, ProxiedFleet

CLOCK: dict[str, Any] = {"name": "clock", "input_schema": {"type": "object"}}
CALLING = (
    '<think>Look.</think>I look.<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'
)
ASK: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 500,
    "messages": [{"role": "user", "content": "When?"}],
    "tools": [CLOCK],
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxiedFleet]:
    with ExitStack() as stack:
        yield ProxiedFleet(tmp_path_factory.mktemp("fleet"), stack, FakeEngine(CALLING))


def post(fleet: ProxiedFleet, way: str, **more: Any) -> httpx.Response:
    return fleet.ask(way, "/v1/messages", **{**ASK, **more})


@WAYS
def test_the_anthropic_client_streams_a_call_through_a_fleet(fleet: ProxiedFleet, way: str) -> None:
    from anthropic import Anthropic

    with (
        Anthropic(base_url=fleet.urls[way], api_key=fleet.fleet.key, max_retries=0) as client,
        client.messages.stream(**ASK) as stream,
    ):
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.stop_reason == "tool_use"
    assert final.usage.output_tokens == len(CALLING)


@WAYS
def test_a_stream_and_a_whole_answer_pass_unchanged(fleet: ProxiedFleet, way: str) -> None:
    blocks = blocks_of(parse_stream(post(fleet, way, stream=True).text))
    message = parse_message(post(fleet, way).text)
    assert [block.type for block in message.content] == [block["type"] for block in blocks]


@WAYS
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_charged_by_the_tokens_of_its_usage(fleet: ProxiedFleet, way: str, stream: bool) -> None:
    before = fleet.paid()
    assert post(fleet, way, stream=stream).status_code == 200
    num_prompt = len(fleet.engine.handles[-1].request.prompt_ids)
    assert fleet.paid() == before + num_prompt + 2 * len(CALLING)


@WAYS
def test_errors_have_anthropics_form(fleet: ProxiedFleet, way: str) -> None:
    for more, status, kind in (
        ({"model": "nobody-serves-this"}, 404, "not_found_error"),
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"messages": [{"role": "critic", "content": "x"}]}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error"),
    ):
        answer = post(fleet, way, **more)
        assert (answer.status_code, answer.json()["type"]) == (status, "error")
        assert answer.json()["error"]["type"] == kind


@WAYS
def test_a_prompt_that_is_too_long_is_said_in_the_words_of_the_head(fleet: ProxiedFleet, way: str) -> None:
    answer = post(fleet, way, messages=[{"role": "user", "content": way * 1000}], tools=[])
    assert answer.status_code == 400
    num_prompt = len("<user><assistant>") + 1000 * len(way)
    assert answer.json()["error"]["message"] == f"prompt is too long: {num_prompt} tokens > 4096 maximum"


def test_a_stream_that_breaks_ends_with_an_error_event(fleet: ProxiedFleet) -> None:
    engine = fleet.engine
    engine.pause_after = engine.fail_after = 60
    engine.error = StageLost("beta is gone")
    url, headers = f"{fleet.fleet.url}/v1/messages", {"x-api-key": fleet.fleet.key}
    try:
        with httpx.stream("POST", url, json={**ASK, "stream": True}, headers=headers, timeout=30) as answer:
            parts = answer.iter_text()
            text = next(parts)
            engine.go.set()
            text += "".join(parts)
    finally:
        engine.pause_after = engine.fail_after = engine.error = None
    events = parse_stream(text)
    assert events[-1]["type"] == "error"
    assert "message_stop" not in [event["type"] for event in events]
