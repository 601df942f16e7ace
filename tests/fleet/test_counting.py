"""What a fleet answers beside generated text: counts of tokens, models, and paths that it does not have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from support.fleet import FAST, MODEL, FakeEngine, engine_server, question
from support.proxied_fleet import WAYS, ProxiedFleet

TURN: dict[str, Any] = {"role": "user", "content": "When? " * 100}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxiedFleet]:
    with ExitStack() as stack:
        yield ProxiedFleet(tmp_path_factory.mktemp("fleet"), stack)


@WAYS
def test_the_anthropic_client_counts_tokens_for_a_sixteenth_of_their_price(
    fleet: ProxiedFleet, way: str
) -> None:
    from anthropic import Anthropic

    before, asked = fleet.paid(), len(fleet.engine.handles)
    with Anthropic(base_url=fleet.urls[way], api_key=fleet.fleet.key, max_retries=0) as client:
        count: Any = client.messages.count_tokens(model=MODEL, messages=[TURN])  # type: ignore[list-item]
    assert count.input_tokens == len(f"<user>{TURN['content']}<assistant>")
    assert len(fleet.engine.handles) == asked
    # A quarter of the bytes, and of that a sixteenth.
    assert len(TURN["content"]) // 64 <= fleet.paid() - before <= len(TURN["content"]) // 64 + 5


@WAYS
def test_a_text_becomes_tokens_and_text_again(fleet: ProxiedFleet, way: str) -> None:
    found = fleet.ask(way, "/tokenize", model=MODEL, prompt="When?").json()
    assert found["tokens"] == list(b"When?")
    assert fleet.ask(way, "/detokenize", model=MODEL, tokens=found["tokens"]).json() == {"prompt": "When?"}
    chat = fleet.ask(way, "/tokenize", model=MODEL, messages=[{"role": "user", "content": "When?"}]).json()
    assert chat["count"] == len("<user>When?<assistant>")


@WAYS
def test_counts_that_cannot_be_made_are_refused_in_the_form_of_their_api(
    fleet: ProxiedFleet, way: str
) -> None:
    answer = fleet.ask(way, "/v1/messages/count_tokens", model=MODEL, messages="x", max_tokens=3)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    answer = fleet.ask(way, "/v1/messages/count_tokens", model="nobody-serves-this", messages=[TURN])
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
    answer = fleet.ask(way, "/tokenize", model=MODEL, prompt="x" * 5000)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    answer = fleet.ask(way, "/detokenize", model=MODEL, tokens=[257])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens[0]")


@WAYS
def test_the_models_are_listed_in_the_form_of_each_client(fleet: ProxiedFleet, way: str) -> None:
    from anthropic import Anthropic

    url, key = fleet.urls[way], fleet.fleet.key
    with Anthropic(base_url=url, api_key=key, max_retries=0) as client:
        (listed,) = client.models.list()
        assert client.models.retrieve(MODEL) == listed
    assert (listed.id, listed.type, listed.max_input_tokens) == (MODEL, "model", FAST.max_context)
    with OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as openai:
        (model,) = openai.models.list()
        assert openai.models.retrieve(MODEL).id == model.id == MODEL
    assert fleet.ask(way, "/v1/models/nobody-serves-this", "GET").status_code == 404
    head = fleet.ask(way, "/v1/models", "HEAD")
    assert (head.status_code, head.content) == (200, b"")


@WAYS
def test_a_client_that_looks_for_a_server_needs_no_key(fleet: ProxiedFleet, way: str) -> None:
    assert httpx.head(f"{fleet.urls[way]}/", trust_env=False).status_code == 200


@WAYS
@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_no_response_is_stored(fleet: ProxiedFleet, way: str, method: str) -> None:
    answer = fleet.ask(way, "/v1/responses/resp_1", method)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")


@WAYS
def test_an_engine_without_a_path_is_no_fault_of_its_provider(tmp_path: Path, way: str) -> None:
    with ExitStack() as stack:
        fleet = ProxiedFleet(tmp_path, stack, engine_url=stack.enter_context(engine_server(FakeEngine())))
        for path, body, code in (
            ("/v1/responses", {"input": "hi"}, "unsupported_endpoint"),
            ("/v1/completions", {"prompt": "hi"}, "unsupported_endpoint"),
            ("/tokenize", {"prompt": "hi"}, "unsupported_endpoint"),
            ("/v1/messages", {"messages": [TURN], "max_tokens": 8}, None),
            ("/v1/messages/count_tokens", {"messages": [TURN]}, None),
        ):
            answer = fleet.ask(way, path, model=MODEL, **body)
            assert (answer.status_code, answer.json()["error"].get("code")) == (400, code)
            assert f"does not serve {path}" in answer.json()["error"]["message"]
        assert fleet.paid() == 0
        assert fleet.ask(way, "/v1/chat/completions", **question(1, 2)).status_code == 200


@WAYS
def test_an_engine_that_keeps_no_such_item_has_the_path(tmp_path: Path, way: str) -> None:
    errors = iter(
        [
            {"message": "nothing is kept", "type": "x", "param": "input[0].id", "code": None},
            {"message": "nothing is kept", "type": "x", "param": None, "code": "item_not_found"},
            {"message": "nothing is kept", "type": "x", "param": None, "code": "not_found"},
        ]
    )

    async def answer(_: Request) -> JSONResponse:
        return JSONResponse({"error": next(errors)}, 404)

    engine = FakeEngine()
    engine.app.router.routes.append(Route("/v1/responses", answer, methods=["POST"]))
    with ExitStack() as stack:
        fleet = ProxiedFleet(tmp_path, stack, engine_url=stack.enter_context(engine_server(engine)))
        for number, found in enumerate(
            [("input[0].id", None), (None, "item_not_found"), (None, "unsupported_endpoint")]
        ):
            refusal = fleet.ask(way, "/v1/responses", model=MODEL, input=f"hi {number}")
            error = refusal.json()["error"]
            assert (refusal.status_code, error["param"], error["code"]) == (400, *found)
        assert fleet.paid() == 0
