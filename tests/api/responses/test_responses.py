"""/v1/responses with the real client and by hand, over a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai as sdk
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent

from convoy.api.keys.key_file import ApiKey, digest_of
from convoy.api.keys.keys import KeyRing
from convoy.api.listen.options import ServeOptions
from convoy.errors import StageLost
from support.fake_service import REPLY, FakeEngine, Running, serving
from support.strict_types import parse_strictly

PATH = "/v1/responses"
ANN, BOB = "ann-has-a-long-key", "bob-has-a-long-key"


def named(text: str) -> list[tuple[str, Any]]:
    """Return a stream's events with their names."""
    found = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "event" in lines:
            found.append((lines["event"], json.loads(lines["data"])))
    return found


def stream(http: httpx.Client, **body: Any) -> list[tuple[str, Any]]:
    answer = http.post(PATH, json={"input": "hi", "stream": True, **body})
    assert answer.status_code == 200, answer.text
    return named(answer.text)


def whole(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post(PATH, json={"input": "hi", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def refused(http: httpx.Client, status: int = 400, **body: Any) -> dict[str, Any]:
    answer = http.post(PATH, json={"input": "hi", **body})
    assert answer.status_code == status, answer.text
    return answer.json()["error"]  # type: ignore[no-any-return]


def prompt(running: Running) -> str:
    return bytes(running.engine.handles[-1].request.prompt_ids).decode()


@pytest.fixture
def storing() -> Iterator[Running]:
    keys = KeyRing([ApiKey("ann", digest_of(ANN)), ApiKey("bob", digest_of(BOB))])
    with serving(options=ServeOptions(port=0, drain_s=5.0, keys=keys, store_responses=True)) as running:
        yield running


def client_of(running: Running, key: str) -> OpenAI:
    return OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0, timeout=60.0)


# Whole loops with the client; `test_open_responses` has the cases of Open Responses.


def test_basic_text(openai: OpenAI) -> None:
    response = openai.responses.create(model="fake", input="What is it?")
    assert response.output_text == REPLY
    assert (response.status, response.object, response.output[0].type) == ("completed", "response", "message")
    assert response.id.startswith("resp_")
    assert response.usage is not None
    assert response.usage.input_tokens == len("<user>What is it?<assistant>")
    assert response.usage.output_tokens == len(REPLY)
    assert response.usage.total_tokens == response.usage.input_tokens + len(REPLY)


def test_streamed_text(openai: OpenAI) -> None:
    with openai.responses.stream(model="fake", input="What is it?") as events:
        seen = list(events)
        final = events.get_final_response()
    assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == REPLY
    assert final.output_text == REPLY
    assert seen[0].type == "response.created"
    assert seen[-1].type == "response.completed"


def test_system_prompt(server: Running, openai: OpenAI) -> None:
    openai.responses.create(
        model="fake",
        instructions="Be brief.",
        input=[{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "hi"}],
    )
    assert prompt(server) == "<system>Be brief.\n\nBe kind.<user>hi<assistant>"


def test_multi_turn(server: Running, openai: OpenAI) -> None:
    first = openai.responses.create(model="fake", input="My name is Ann.")
    history: Any = [{"role": "user", "content": "My name is Ann."}]
    history += [item.model_dump() for item in first.output]
    openai.responses.create(model="fake", input=[*history, {"role": "user", "content": "What is it?"}])
    assert prompt(server) == f"<user>My name is Ann.<assistant>{REPLY}<user>What is it?<assistant>"


def test_previous_response_id(storing: Running) -> None:
    with client_of(storing, ANN) as openai:
        first = openai.responses.create(model="fake", input="My name is Ann.", instructions="Be brief.")
        second = openai.responses.create(model="fake", input="What is it?", previous_response_id=first.id)
        assert second.previous_response_id == first.id
        # Instructions belong to one response, as OpenAI has it.
        assert prompt(storing) == f"<user>My name is Ann.<assistant>{REPLY}<user>What is it?<assistant>"
        openai.responses.create(model="fake", input="And?", previous_response_id=second.id)
        assert prompt(storing).endswith(f"<user>What is it?<assistant>{REPLY}<user>And?<assistant>")


SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOL: Any = {
    "type": "function",
    "name": "read",
    "description": "Read.",
    "parameters": SCHEMA,
    "strict": False,
}
ARGUMENTS = '{"path": "notes.txt"}'
CALLING = (
    "<think>\nI need the file.\n</think>\n\nLet me look.\n"
    f'<tool_call>\n{{"name": "read", "arguments": {ARGUMENTS}}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def calling() -> Iterator[Running]:
    with serving(FakeEngine(CALLING)) as running:
        yield running


def test_tool_calling(calling: Running) -> None:
    with client_of(calling, "unused") as openai:
        first = openai.responses.create(model="fake", input="Read notes.txt.", tools=[TOOL])
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        assert first.status == "completed"
        call: Any = first.output[2]
        assert (call.name, call.arguments, call.status) == ("read", ARGUMENTS, "completed")
        assert call.call_id.startswith("call_")
        history: Any = [{"role": "user", "content": "Read notes.txt."}]
        history += [item.model_dump() for item in first.output]
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
        openai.responses.create(model="fake", input=[*history, result], tools=[TOOL])
        assert prompt(calling).endswith(
            "<user>Read notes.txt.<assistant><think>I need the file.</think>Let me look."
            f"<call {call.call_id} read>{ARGUMENTS}<tool>42<result of {call.call_id} read><assistant>"
        )


def test_streamed_tool_calling(calling: Running) -> None:
    with (
        client_of(calling, "unused") as openai,
        openai.responses.stream(model="fake", input="Read notes.txt.", tools=[TOOL]) as events,
    ):
        seen = list(events)
        final = events.get_final_response()
    deltas = [event.delta for event in seen if event.type == "response.function_call_arguments.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == ARGUMENTS
    done = [event for event in seen if event.type == "response.output_item.done"]
    assert [event.item.type for event in done] == ["reasoning", "message", "function_call"]
    call: Any = final.output[2]
    assert call.arguments == ARGUMENTS
    assert call.call_id == done[2].item.to_dict()["call_id"]


def test_a_call_can_be_answered_by_previous_response_id() -> None:
    options = ServeOptions(port=0, drain_s=5.0, store_responses=True)
    with serving(FakeEngine(CALLING), options) as running, client_of(running, "unused") as openai:
        first = openai.responses.create(model="fake", input="Read notes.txt.", tools=[TOOL])
        call: Any = first.output[2]
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
        openai.responses.create(model="fake", input=[result], tools=[TOOL], previous_response_id=first.id)
        assert prompt(running).endswith(f"{ARGUMENTS}<tool>42<result of {call.call_id} read><assistant>")


def test_every_event_of_a_call_is_one_of_openais_types_in_strict_mode(calling: Running) -> None:
    space = {"type": "namespace", "name": "disk", "description": "Files.", "tools": [TOOL]}
    with httpx.Client(base_url=calling.url, timeout=60.0) as http:
        for reasoning in ({}, {"summary": "auto"}):
            tools = [TOOL, space, {"type": "web_search"}, {"type": "custom", "name": "patch"}]
            events = stream(http, tools=tools, reasoning=reasoning)
            for _, data in events:
                parse_strictly(ResponseStreamEvent, json.dumps(data))
            kind = "summary_text" if reasoning else "text"
            assert f"response.reasoning_{kind}.delta" in [name for name, _ in events]


def test_the_second_turn_of_an_agent_begins_with_its_whole_first_prompt(calling: Running) -> None:
    """Codex sends such bodies, and sends items back with ids of its own and without a reasoning's content."""
    space = {"type": "namespace", "name": "mcp__disk__", "description": "Files.", "tools": [TOOL]}
    body = {
        "model": "fake",
        "tools": [TOOL, space, {"type": "web_search", "external_web_access": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "key",
        "client_metadata": {"x": "y"},
    }
    history: list[Any] = [
        {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}
        for role, text in (
            ("developer", "Rules."),
            ("developer", "More."),
            ("user", "Here."),
            ("user", "Go."),
        )
    ]
    with httpx.Client(base_url=calling.url, timeout=60.0) as http:
        items = [
            data["item"]
            for name, data in named(http.post(PATH, json={**body, "input": history}).text)
            if name == "response.output_item.done"
        ]
        first = prompt(calling)
        replayed = [{key: value for key, value in item.items() if key != "content"} for item in items[:1]]
        call = {**items[2], "id": "fc_of_the_client"}
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "42"}
        answer = http.post(PATH, json={**body, "input": [*history, *replayed, items[1], call, result]})
    assert answer.status_code == 200
    assert prompt(calling).startswith(first)
    assert "<think>I need the file.</think>Let me look." in prompt(calling)
    assert "mcp__disk__read" in first


def test_a_tool_choice_of_none_leaves_a_call_as_text(calling: Running) -> None:
    with client_of(calling, "unused") as openai:
        response = openai.responses.create(model="fake", input="hi", tools=[TOOL], tool_choice="none")
    assert [item.type for item in response.output] == ["reasoning", "message"]


def test_a_form_of_the_answer_reaches_the_engine_as_a_grammar(server: Running, http: httpx.Client) -> None:
    schema = {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}
    for form in ({"type": "json_object"}, schema):
        whole(http, text={"format": form})
        assert server.engine.handles[-1].request.grammar is not None
    whole(http, text={"format": {"type": "text"}})
    assert server.engine.handles[-1].request.grammar is None


def test_only_a_strict_schema_refuses_a_keyword_that_cannot_be_enforced(http: httpx.Client) -> None:
    form = {"type": "json_schema", "name": "a", "schema": {"type": "array", "uniqueItems": True}}
    error = refused(http, text={"format": {**form, "strict": True}})
    assert (error["code"], error["param"]) == ("unsupported_schema", "text.format.schema")
    whole(http, text={"format": form})


def test_a_required_call_is_a_grammar_too(server: Running, http: httpx.Client) -> None:
    other = {**TOOL, "name": "write"}
    for choice in ("required", {"type": "function", "name": "write"}):
        whole(http, tools=[TOOL, other], tool_choice=choice)
        assert server.engine.handles[-1].request.grammar is not None


def test_the_effort_reaches_the_template(server: Running, http: httpx.Client) -> None:
    whole(http, reasoning={"effort": "none"})
    assert '"enable_thinking": false' in prompt(server)
    whole(http, reasoning={"effort": "high"})
    assert '"reasoning_effort": "high"' in prompt(server)


# Events.


def test_a_stream_has_every_event_in_order_under_its_name(http: httpx.Client) -> None:
    events = stream(http)
    names = [name for name, _ in events]
    assert names[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert names[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(names[4:-4]) == {"response.output_text.delta"}
    for number, (name, data) in enumerate(events):
        assert (data["type"], data["sequence_number"]) == (name, number)
        parse_strictly(ResponseStreamEvent, json.dumps(data))


def test_a_stream_and_a_whole_answer_say_the_same(http: httpx.Client) -> None:
    last = stream(http, seed=1)[-1][1]["response"]
    other = whole(http, seed=1)
    for response in (last, other):
        parse_strictly(Response, json.dumps(response))
        for field in ("id", "created_at", "completed_at"):
            del response[field]
        del response["output"][0]["id"]
    assert last == other


def test_a_stream_ends_with_done(http: httpx.Client) -> None:
    answer = http.post(PATH, json={"input": "hi", "stream": True})
    assert answer.text.endswith("data: [DONE]\n\n")
    assert answer.headers["content-type"].startswith("text/event-stream")


def test_an_answer_that_reaches_its_most_tokens_is_incomplete(http: httpx.Client) -> None:
    name, data = stream(http, max_output_tokens=3)[-1]
    parse_strictly(ResponseStreamEvent, json.dumps(data))
    response = data["response"]
    assert (name, response["status"]) == ("response.incomplete", "incomplete")
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (response["output"][0]["status"], response["output"][0]["content"][0]["text"]) == (
        "incomplete",
        "The",
    )
    assert whole(http, max_output_tokens=3)["status"] == "incomplete"


def test_an_answer_without_a_word_has_an_empty_message() -> None:
    with serving(FakeEngine("")) as running, httpx.Client(base_url=running.url, timeout=60.0) as http:
        assert whole(http)["output"][0]["content"][0]["text"] == ""
        assert [name for name, _ in stream(http)][-1] == "response.completed"


def test_a_silent_stream_is_kept_alive_by_events() -> None:
    engine = FakeEngine()
    engine.pause_after = 0
    options = ServeOptions(port=0, drain_s=5.0, heartbeat_s=0.05)
    with (
        serving(engine, options) as running,
        httpx.Client(base_url=running.url, timeout=60.0) as http,
        http.stream("POST", PATH, json={"input": "hi", "stream": True}) as answer,
    ):
        text, kept = "", 0
        for part in answer.iter_text():
            text += part
            kept = text.count("event: response.in_progress")
            if kept >= 4:
                engine.go.set()
        events = named(text)
    assert kept >= 4
    assert "still here" not in text
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert events[-1][0] == "response.completed"


def breaking() -> FakeEngine:
    """Return an engine that loses a stage after three tokens, once ``go`` is set."""
    engine = FakeEngine()
    engine.pause_after, engine.fail_after, engine.error = 1, 3, StageLost("a peer's own words")
    return engine


def test_a_stream_that_breaks_ends_with_response_failed() -> None:
    engine, text = breaking(), ""
    with (
        serving(engine) as running,
        httpx.Client(base_url=running.url, timeout=60.0) as http,
        http.stream("POST", PATH, json={"input": "hi", "stream": True}) as answer,
    ):
        for part in answer.iter_text():
            text += part
            engine.go.set()
    name, data = named(text)[-1]
    parse_strictly(ResponseStreamEvent, json.dumps(data))
    assert (name, data["response"]["status"]) == ("response.failed", "failed")
    error = data["response"]["error"]
    assert (error["code"], error["type"]) == ("server_error", "stage_lost")
    assert "own words" not in text
    assert "[DONE]" not in text


def test_a_whole_answer_that_breaks_has_its_status() -> None:
    engine = FakeEngine()
    engine.fail_after, engine.error = 3, StageLost("a peer's own words")
    with serving(engine) as running, httpx.Client(base_url=running.url, timeout=60.0) as http:
        assert refused(http, 503)["code"] == "stage_lost"


# A context that is too long.


def test_a_stream_that_does_not_fit_the_context_fails_as_an_event(http: httpx.Client) -> None:
    events = stream(http, input="x" * 5000)
    assert [name for name, _ in events] == ["response.created", "response.failed"]
    error = events[-1][1]["response"]["error"]
    assert error["code"] == "context_length_exceeded"
    assert "4096" in error["message"]


def test_an_answer_that_leaves_no_room_fails_in_the_same_way(http: httpx.Client) -> None:
    error = stream(http, max_output_tokens=4090)[-1][1]["response"]["error"]
    assert error["code"] == "context_length_exceeded"
    assert "4090" in error["message"]


def test_a_whole_answer_that_does_not_fit_the_context_is_a_400(http: httpx.Client, openai: OpenAI) -> None:
    for body in ({"input": "x" * 5000}, {"max_output_tokens": 4090}):
        assert refused(http, **body)["code"] == "context_length_exceeded"
    with pytest.raises(sdk.BadRequestError) as caught:
        openai.responses.create(model="fake", input="x" * 5000)
    assert caught.value.code == "context_length_exceeded"


def test_truncation_auto_leaves_out_the_oldest_turns(server: Running, http: httpx.Client) -> None:
    turns: list[Any] = [{"role": "system", "content": "Be brief."}]
    for number in range(20):
        turns.append({"role": "user", "content": f"{number} " + "x" * 500})
        turns.append({"role": "assistant", "content": "yes"})
    turns.append({"role": "user", "content": "last"})
    assert refused(http, input=turns)["code"] == "context_length_exceeded"
    response = whole(http, input=turns, truncation="auto")
    assert response["truncation"] == "auto"
    text = prompt(server)
    assert text.startswith("<system>Be brief.<user>")
    assert text.endswith("<user>last<assistant>")
    assert 3000 < len(text) < 4096


def test_truncation_cannot_cut_a_single_turn(http: httpx.Client) -> None:
    assert refused(http, input="x" * 5000, truncation="auto")["code"] == "context_length_exceeded"
    items = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    long = {"role": "user", "content": "x" * 5000}
    assert refused(http, input=[*items, long], truncation="auto")["code"] == "context_length_exceeded"


# The request.


def test_the_answer_repeats_the_request_as_it_was_understood(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    response = whole(
        http,
        instructions="Be brief.",
        metadata={"run": "7"},
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=40,
        parallel_tool_calls=False,
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}},
        prompt_cache_key="key",
        safety_identifier="user",
        store=True,
        background=True,
        include=["reasoning.encrypted_content"],
        client_metadata={"any": "thing"},
        unheard_of={"of": [1]},
    )
    parse_strictly(Response, json.dumps(response))
    assert response["instructions"] == "Be brief."
    assert response["metadata"] == {"run": "7"}
    assert (response["temperature"], response["top_p"], response["max_output_tokens"]) == (0.5, 0.9, 40)
    assert response["parallel_tool_calls"] is False
    assert response["reasoning"] == {"effort": "low", "summary": "auto"}
    assert response["text"]["format"]["schema"] == schema
    assert (response["prompt_cache_key"], response["safety_identifier"]) == ("key", "user")
    # This server stores nothing, whatever was asked.
    assert (response["store"], response["background"]) == (False, False)


def test_parameters_reach_the_engine(server: Running, http: httpx.Client) -> None:
    whole(http, temperature=0.5, top_p=0.9, presence_penalty=0.1, frequency_penalty=0.2, seed=-5)
    params = server.engine.handles[-1].request.params
    assert (params.temperature, params.top_p, params.seed) == (0.5, 0.9, -5)
    assert (params.presence_penalty, params.frequency_penalty) == (0.1, 0.2)


LATE = "<system-reminder>\nnote\n</system-reminder>"


def test_turns_are_folded_in_place(server: Running, http: httpx.Client) -> None:
    said = {"role": "assistant", "content": "yes"}
    users = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    late = {"role": "developer", "content": "note"}
    whole(http, input=[{"role": "system", "content": "s"}, *users, said, late, users[0]])
    assert prompt(server) == f"<system>s<user>a\n\nb<assistant>yes<user>{LATE}\n\na<assistant>"


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("input", None, "input"),
        ("input", [], "input"),
        ("input", 5, "input"),
        ("input", [{"role": "wizard", "content": "x"}], "input[0].role"),
        ("instructions", 5, "instructions"),
        ("max_output_tokens", 0, "max_output_tokens"),
        ("temperature", 3, "temperature"),
        ("truncation", "middle", "truncation"),
        ("reasoning", {"effort": "<|system|>"}, "reasoning.effort"),
        ("text", {"format": {"type": "xml"}}, "text.format.type"),
        ("text", {"format": {"type": "json_schema"}}, "text.format.schema"),
        ("metadata", {"a": 1}, "metadata"),
        ("metadata", {"a": "x" * 513}, "metadata"),
        ("metadata", {str(i): "x" for i in range(17)}, "metadata"),
        ("prompt_cache_key", "x" * 513, "prompt_cache_key"),
        ("safety_identifier", "x" * 513, "safety_identifier"),
        ("user", "x" * 513, "user"),
        ("tools", [{"type": "function"}], "tools[0].name"),
        ("tools", 5, "tools"),
        ("tool_choice", "required", "tool_choice"),
        ("conversation", "conv_1", "conversation"),
        ("prompt", {"id": "pmpt_1"}, "prompt"),
    ],
)
def test_a_wrong_field_is_named(
    server: Running, http: httpx.Client, field: str, value: Any, param: str
) -> None:
    before = len(server.engine.handles)
    for streams in (False, True):
        assert refused(http, **{field: value, "stream": streams})["param"] == param
    assert len(server.engine.handles) == before


def test_a_missing_input_and_an_unknown_model_are_refused(http: httpx.Client) -> None:
    answer = http.post(PATH, json={"model": "fake"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
    assert refused(http, 404, model="other")["code"] == "model_not_found"


# The store.


def test_without_a_store_an_id_is_unknown_and_the_error_says_why(http: httpx.Client) -> None:
    made = whole(http, store=True)["id"]
    error = refused(http, 404, previous_response_id=made)
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")
    assert "stores no responses" in error["message"]
    for method in ("GET", "DELETE"):
        answer = http.request(method, f"{PATH}/{made}")
        assert answer.status_code == 404
        assert "stores no responses" in answer.json()["error"]["message"]


def test_a_stored_response_is_read_and_deleted_by_its_key_alone(storing: Running) -> None:
    with client_of(storing, ANN) as ann, client_of(storing, BOB) as bob:
        made = ann.responses.create(model="fake", input="hi")
        assert made.to_dict()["store"] is True
        assert ann.responses.retrieve(made.id) == made
        for ask in (bob.responses.retrieve, bob.responses.delete):
            with pytest.raises(sdk.NotFoundError):
                ask(made.id)
        with pytest.raises(sdk.NotFoundError) as caught:
            bob.responses.create(model="fake", input="hi", previous_response_id=made.id)
        assert caught.value.code == "previous_response_not_found"
        ann.responses.delete(made.id)
        with pytest.raises(sdk.NotFoundError):
            ann.responses.retrieve(made.id)


def test_an_item_of_a_stored_response_is_named_by_its_key_alone(storing: Running) -> None:
    with client_of(storing, ANN) as ann, client_of(storing, BOB) as bob:
        (item,) = ann.responses.create(model="fake", input="hi").output
        given: Any = [{"type": "item_reference", "id": item.id}, {"role": "user", "content": "again"}]
        ann.responses.create(model="fake", input=given)
        assert prompt(storing) == f"<assistant>{REPLY}<user>again<assistant>"
        for client, name in ((bob, item.id), (ann, f"{item.id}9"), (ann, "msg_1")):
            wrong: Any = [{"type": "item_reference", "id": name}]
            with pytest.raises(sdk.NotFoundError) as caught:
                client.responses.create(model="fake", input=wrong)
            assert (caught.value.param, caught.value.code) == ("input[0].id", "item_not_found")


def test_references_bring_at_most_the_bytes_of_a_body() -> None:
    options = ServeOptions(port=0, store_responses=True, max_body_bytes=4000)
    with serving(options=options) as running, httpx.Client(base_url=running.url, timeout=60.0) as http:
        (item,) = whole(http)["output"]
        most = 4000 // len(json.dumps(item, separators=(",", ":")))
        reference = {"id": item["id"]}
        whole(http, input=[reference] * most)
        error = refused(http, 413, input=[reference] * (most + 1))
    assert (error["param"], error["code"]) == (f"input[{most}].id", "body_too_long")
    assert "4000 bytes" in error["message"]


def test_callers_that_share_a_key_are_kept_apart_by_their_cache_salt(storing: Running) -> None:
    headers = {"authorization": f"Bearer {ANN}"}
    with httpx.Client(base_url=storing.url, timeout=60.0, headers=headers) as http:
        made = whole(http, cache_salt="one")["id"]
        whole(http)
        salted, plain = (handle.request.cache_salt for handle in storing.engine.handles[-2:])
        assert plain != salted
        assert whole(http, cache_salt="one", previous_response_id=made)["previous_response_id"] == made
        for other in ({}, {"cache_salt": "two"}):
            assert refused(http, 404, previous_response_id=made, **other)["param"] == "previous_response_id"
        assert http.get(f"{PATH}/{made}").status_code == 404


def test_a_streamed_response_is_stored_before_its_last_event(storing: Running) -> None:
    with client_of(storing, ANN) as ann:
        for event in ann.responses.create(model="fake", input="hi", stream=True):
            if event.type == "response.completed":
                assert ann.responses.retrieve(event.response.id).output_text == REPLY


def test_a_response_with_store_false_is_not_stored(storing: Running) -> None:
    with client_of(storing, ANN) as ann:
        made = ann.responses.create(model="fake", input="hi", store=False)
        assert made.to_dict()["store"] is False
        with pytest.raises(sdk.NotFoundError):
            ann.responses.retrieve(made.id)


def test_a_failed_response_is_not_stored() -> None:
    engine = breaking()
    options = ServeOptions(port=0, drain_s=5.0, store_responses=True)
    with serving(engine, options) as running, client_of(running, "unused") as openai:
        last = None
        for event in openai.responses.create(model="fake", input="hi", stream=True):
            engine.go.set()
            last = event
        assert last is not None
        assert last.type == "response.failed"
        with pytest.raises(sdk.NotFoundError):
            openai.responses.retrieve(last.response.id)


def test_other_methods_are_named(http: httpx.Client) -> None:
    answer = http.put(f"{PATH}/resp_1")
    assert answer.status_code == 405
    assert "DELETE" in answer.headers["allow"]
    assert http.get(PATH).status_code == 405
