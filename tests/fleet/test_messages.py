"""The Messages API through provider, coordinator and blind proxy, with a head's own HTTP server behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from convoy.errors import StageLost
from convoy.fleet.books.price import Price
from convoy.fleet.consumer_request import ModelOptions
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.fleet.proxy.trust import Trust
from support.anthropic_events import blocks_of, parse_message, parse_stream
from support.fake_service import FakeEngine, Running, serving
from support.fleet import MODEL, FleetUnderTest
from support.proxy import proxy
from support.waiting import wait_until

OPTIONS = CoordinatorOptions(
    instance="test", models={MODEL: ModelOptions(Price(1_000_000, 2_000_000), 64)}, first_token_s=10.0
)
BALANCE = 10**12
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


class Fleet:
    """A fleet with one provider before a real server, and a proxy that trusts it."""

    def __init__(self, folder: Any, stack: ExitStack) -> None:
        self.engine = FakeEngine(CALLING)
        self.head: Running = stack.enter_context(serving(self.engine, model=MODEL))
        self.fleet = FleetUnderTest(folder, OPTIONS)
        stack.callback(self.fleet.close)
        self.fleet.add("one", self.head.url)
        trust = Trust(frozenset(self.fleet.identities))
        proxied = stack.enter_context(proxy(self.fleet.url, self.fleet.key, trust))
        self.urls = {"coordinator": self.fleet.url, "proxy": proxied}

    def post(self, way: str, **more: Any) -> httpx.Response:
        headers = {"x-api-key": self.fleet.key}
        url = f"{self.urls[way]}/v1/messages"
        return httpx.post(url, json={**ASK, **more}, headers=headers, timeout=30, trust_env=False)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(tmp_path_factory.mktemp("fleet"), stack)


WAYS = pytest.mark.parametrize("way", ["coordinator", "proxy"])


@WAYS
def test_the_anthropic_client_streams_a_call_through_a_fleet(fleet: Fleet, way: str) -> None:
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
def test_a_stream_and_a_whole_answer_pass_unchanged(fleet: Fleet, way: str) -> None:
    blocks = blocks_of(parse_stream(fleet.post(way, stream=True).text))
    message = parse_message(fleet.post(way).text)
    assert [block.type for block in message.content] == [block["type"] for block in blocks]


@WAYS
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_charged_by_the_tokens_of_its_usage(fleet: Fleet, way: str, stream: bool) -> None:
    ledger = fleet.fleet.ledger

    def at_rest() -> int:
        paid = sum(one.cost_micro for one in ledger.usage("ann"))
        wait_until(lambda: ledger.balance("ann") + sum(o.cost_micro for o in ledger.usage("ann")) == BALANCE)
        return BALANCE - paid

    before = at_rest()
    assert fleet.post(way, stream=stream).status_code == 200
    num_prompt = len(fleet.engine.handles[-1].request.prompt_ids)
    assert at_rest() == before - (num_prompt + 2 * len(CALLING))


@WAYS
def test_errors_have_anthropics_form(fleet: Fleet, way: str) -> None:
    for more, status, kind in (
        ({"model": "nobody-serves-this"}, 404, "not_found_error"),
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"messages": [{"role": "critic", "content": "x"}]}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error"),
    ):
        answer = fleet.post(way, **more)
        assert (answer.status_code, answer.json()["type"]) == (status, "error")
        assert answer.json()["error"]["type"] == kind


@WAYS
def test_a_prompt_that_is_too_long_is_said_in_the_words_of_the_head(fleet: Fleet, way: str) -> None:
    answer = fleet.post(way, messages=[{"role": "user", "content": way * 1000}], tools=[])
    assert answer.status_code == 400
    num_prompt = len("<user><assistant>") + 1000 * len(way)
    assert answer.json()["error"]["message"] == f"prompt is too long: {num_prompt} tokens > 4096 maximum"


def test_a_stream_that_breaks_ends_with_an_error_event(fleet: Fleet) -> None:
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
