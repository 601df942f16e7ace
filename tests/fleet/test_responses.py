"""The Responses API through provider, coordinator and blind proxy, with a head's own HTTP server behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from openai import OpenAI

from support.fake_service import FakeEngine
from support.fleet import MODEL
from support.proxied_fleet import WAYS, ProxiedFleet
from support.response_events import parse_response, parse_response_stream

CLOCK: Any = {"type": "function", "name": "clock", "parameters": {"type": "object"}}
CALLING = (
    '<think>Look.</think>I look.<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'
)
ASK: dict[str, Any] = {"model": MODEL, "input": "When?", "tools": [CLOCK]}
TYPES = ["reasoning", "message", "function_call"]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxiedFleet]:
    engine = FakeEngine(CALLING)
    engine.cached_tokens = 7
    with ExitStack() as stack:
        yield ProxiedFleet(tmp_path_factory.mktemp("fleet"), stack, engine)


def post(fleet: ProxiedFleet, way: str, **more: Any) -> httpx.Response:
    body = {name: value for name, value in {**ASK, **more}.items() if value is not None}
    return fleet.ask(way, "/v1/responses", **body)


@WAYS
def test_the_openai_client_streams_a_call_through_a_fleet(fleet: ProxiedFleet, way: str) -> None:
    with (
        OpenAI(base_url=f"{fleet.urls[way]}/v1", api_key=fleet.fleet.key, max_retries=0) as client,
        client.responses.stream(model=MODEL, input="When?", tools=[CLOCK]) as stream,
    ):
        final = stream.get_final_response()
    assert [item.type for item in final.output] == TYPES
    assert final.usage is not None
    assert final.usage.output_tokens == len(CALLING)
    assert final.usage.input_tokens_details.cached_tokens == 7
    assert final.usage.output_tokens_details.reasoning_tokens > 0


@WAYS
def test_a_stream_and_a_whole_response_have_the_same_output_and_are_not_stored(
    fleet: ProxiedFleet, way: str
) -> None:
    events = parse_response_stream(post(fleet, way, stream=True, store=True).text)
    whole = parse_response(post(fleet, way, store=True).text)
    final = events[-1]["response"]
    assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.completed")
    assert [item["type"] for item in final["output"]] == [item.type for item in whole.output] == TYPES
    assert whole.usage is not None
    assert final["usage"] == whole.usage.to_dict()
    assert {event["response"]["store"] for event in events if "response" in event} == {False}
    assert whole.to_dict()["store"] is False


@WAYS
@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_charged_by_the_tokens_of_its_usage(
    fleet: ProxiedFleet, way: str, stream: bool
) -> None:
    before = fleet.paid()
    assert post(fleet, way, stream=stream).status_code == 200
    num_prompt = len(fleet.engine.handles[-1].request.prompt_ids)
    assert fleet.paid() == before + num_prompt + 2 * len(CALLING)


@WAYS
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_reaches_its_limit_is_incomplete(fleet: ProxiedFleet, way: str, stream: bool) -> None:
    answer = post(fleet, way, stream=stream, max_output_tokens=20)
    found = parse_response_stream(answer.text)[-1]["response"] if stream else answer.json()
    assert (found["status"], found["max_output_tokens"]) == ("incomplete", 20)
    assert found["usage"]["output_tokens"] == 20


@WAYS
def test_requests_that_name_texts_elsewhere_are_refused_and_cost_nothing(
    fleet: ProxiedFleet, way: str
) -> None:
    asked, before = len(fleet.engine.handles), fleet.fleet.ledger.balance("ann")
    for more, status, code in (
        ({"previous_response_id": "resp_1"}, 404, "previous_response_not_found"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, 404, "item_not_found"),
        ({"input": [{"role": "user", "content": "a"}, {"id": "rs_1"}]}, 404, "item_not_found"),
        ({"conversation": "conv_1"}, 400, "unsupported_parameter"),
        ({"prompt": {"id": "pmpt_1"}}, 400, "unsupported_parameter"),
        ({"model": "nobody-serves-this"}, 404, "model_not_found"),
        ({"max_output_tokens": "many"}, 400, None),
    ):
        answer = post(fleet, way, **more)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert len(fleet.engine.handles) == asked
    assert fleet.fleet.ledger.balance("ann") == before


@WAYS
def test_an_item_that_the_head_refuses_is_named(fleet: ProxiedFleet, way: str) -> None:
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}
    answer = post(fleet, way, input=[image])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[0].content[0].type")


@WAYS
def test_a_prompt_that_does_not_fit_is_said_in_the_words_of_the_head(fleet: ProxiedFleet, way: str) -> None:
    answer = post(fleet, way, input=way * 1000, tools=None)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "a request may use 4096 with its answer" in error["message"]


@WAYS
def test_a_stream_that_does_not_fit_fails_by_an_event_and_costs_little(fleet: ProxiedFleet, way: str) -> None:
    before = fleet.fleet.ledger.balance("ann")
    answer = post(fleet, way, input=f"{way}!" * 1000, stream=True)
    events = parse_response_stream(answer.text)
    assert [event["type"] for event in events] == ["response.created", "response.failed"]
    assert events[-1]["response"]["error"]["code"] == "context_length_exceeded"
    assert 0 < before - fleet.fleet.ledger.balance("ann") < 1000
