"""Ollama's endpoints as its own Python client reads them, over a real server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from convoy.api.keys.keys import KeyRing
from convoy.api.listen.options import ServeOptions
from convoy.api.ollama.translate import OllamaCall, OllamaChatBody, OllamaMessage, OllamaToolCall, read_ollama
from convoy.api.service import ServedModel, Service
from convoy.api.telemetry.dropped import DroppedHistory
from convoy.errors import RequestError, StageLost
from support.fake_service import MAX_CONTEXT, REPLY, ByteTokenizer, FakeEngine, Running, serving

# Every test process imports this file. The client takes a third of a second.
if TYPE_CHECKING:
    from ollama import Client

ASK = [{"role": "user", "content": "2+3?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


@pytest.fixture
def ollama(server: Running) -> Iterator[Client]:
    with client_of(server) as client:
        yield client


def client_of(running: Running, headers: dict[str, str] | None = None) -> Client:
    from ollama import Client

    return Client(host=running.url, timeout=60.0, headers=headers)


def prompt_of(running: Running) -> str:
    return bytes(running.engine.handles[-1].request.prompt_ids).decode()


def test_a_chat_whole_and_streamed(ollama: Client, server: Running) -> None:
    whole = ollama.chat("fake", messages=ASK)
    assert (whole.message.role, whole.message.content) == ("assistant", REPLY)
    assert (whole.model, whole.done, whole.done_reason) == ("fake", True, "stop")
    assert whole.prompt_eval_count == len(prompt_of(server))
    assert whole.eval_count == len(REPLY)
    assert whole.total_duration is not None
    assert whole.eval_duration is not None
    assert 0 <= whole.eval_duration <= whole.total_duration
    parts = list(ollama.chat("fake", messages=ASK, stream=True))
    assert "".join(part.message.content or "" for part in parts) == REPLY
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == len(REPLY)
    assert all(part.message.role == "assistant" for part in parts)


def test_a_prompt_whole_and_streamed(ollama: Client, server: Running) -> None:
    whole = ollama.generate("fake", "2+3?", system="Be brief.")
    assert (whole.response, whole.done_reason) == (REPLY, "stop")
    assert prompt_of(server) == "<system>Be brief.<user>2+3?<assistant>"
    parts = list(ollama.generate("fake", "2+3?", stream=True))
    assert "".join(part.response or "" for part in parts) == REPLY


def test_a_stream_is_lines_of_json_and_the_default(http: httpx.Client) -> None:
    answer = http.post("/api/chat", json={"model": "fake", "messages": ASK})
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert all(json.loads(line)["model"] == "fake" for line in answer.text.splitlines())


def test_options_mean_the_same_here(ollama: Client, server: Running) -> None:
    given = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "seed": 3, "presence_penalty": 0.2}
    options = {**given, "frequency_penalty": 0.3, "num_predict": 4, "stop": ["!"], "num_ctx": 8192}
    answer = ollama.chat("fake", messages=ASK, options=options)
    assert (answer.message.content, answer.done_reason) == (REPLY[:4], "length")
    request = server.engine.handles[-1].request
    assert {name: getattr(request.params, name) for name in given} == given
    assert (request.params.frequency_penalty, request.max_tokens, request.stop) == (0.3, 4, ("!",))
    ollama.chat("fake", messages=ASK, options={"num_predict": -1, "repeat_penalty": 1.0})
    assert server.engine.handles[-1].request.open_ended


@pytest.mark.parametrize(
    ("think", "variables"),
    [
        (True, {"enable_thinking": True, "thinking": True}),
        (False, {"enable_thinking": False, "thinking": False}),
        ("low", {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}),
    ],
)
def test_think_sets_the_templates_variables(
    ollama: Client, server: Running, think: Any, variables: dict[str, Any]
) -> None:
    ollama.chat("fake", messages=ASK, think=think)
    found = prompt_of(server).removeprefix("<variables>").partition("<user>")[0]
    assert json.loads(found) == variables


def test_thinking_and_calls_come_apart_from_the_text() -> None:
    with serving(FakeEngine(f"<think>hm</think>Let me see.{CALL}")) as running:
        client = client_of(running)
        whole = client.chat("fake", messages=ASK, tools=[TOOL])
        parts = list(client.chat("fake", messages=ASK, tools=[TOOL], stream=True))
        plain = client.generate("fake", "2+3?")
    assert (whole.message.thinking, whole.message.content, whole.done_reason) == ("hm", "Let me see.", "stop")
    assert whole.message.tool_calls is not None
    (call,) = whole.message.tool_calls
    assert (call.function.name, dict(call.function.arguments)) == ("weather", {"city": "Oslo"})
    assert "".join(part.message.thinking or "" for part in parts) == "hm"
    assert "".join(part.message.content or "" for part in parts) == "Let me see."
    calls = [one for part in parts for one in part.message.tool_calls or ()]
    assert [(one.function.name, dict(one.function.arguments)) for one in calls] == [
        ("weather", {"city": "Oslo"})
    ]
    assert plain.thinking == "hm"


@pytest.mark.parametrize("number", ["1e999", "-0.0", "1" + "0" * 1000])
def test_a_number_of_any_size_stays_in_a_calls_arguments(number: str) -> None:
    call = f'<tool_call>{{"name": "weather", "arguments": {{\n"size": {number}\r\n}}}}</tool_call>'
    for stream in (False, True):
        with serving(FakeEngine(call)) as running:
            body = {"model": "fake", "messages": ASK, "tools": [TOOL], "stream": stream}
            text = httpx.post(f"{running.url}/api/chat", json=body, timeout=60.0).text
        lines = [json.loads(line, parse_int=str, parse_float=str) for line in text.splitlines()]
        calls = [one for line in lines for one in line["message"].get("tool_calls", ())]
        assert calls == [{"function": {"name": "weather", "arguments": {"size": number}}}]


def test_a_call_that_was_cut_off_is_text() -> None:
    with serving(FakeEngine(CALL)) as running:
        client = client_of(running)
        whole = client.chat("fake", messages=ASK, tools=[TOOL], options={"num_predict": len(CALL) - 25})
    assert (whole.done_reason, whole.message.tool_calls) == ("length", None)


def test_results_belong_to_the_calls_of_their_tools(ollama: Client, server: Running) -> None:
    called = {"role": "assistant", "content": "", "thinking": "hm"}
    called["tool_calls"] = [  # type: ignore[assignment]
        {"function": {"name": name, "arguments": {"city": "Oslo"}}} for name in ("weather", "time")
    ]
    results = [
        {"role": "tool", "content": "noon", "tool_name": "time"},
        {"role": "tool", "content": "rain"},
    ]
    ollama.chat("fake", messages=[*ASK, called, *results], tools=[TOOL])
    found = prompt_of(server)
    assert '<call call_0 weather>{"city":"Oslo"}<call call_1 time>{"city":"Oslo"}' in found
    assert "<think>hm</think>" in found
    assert "noon<result of call_1 time>" in found
    assert "rain<result of call_0 weather>" in found


def test_a_result_without_a_name_is_of_the_first_call_that_is_open(ollama: Client, server: Running) -> None:
    names = ["weather", "time", "weather", "time"]
    called = {"role": "assistant", "tool_calls": [{"function": {"name": n, "arguments": {}}} for n in names]}
    results = [{"role": "tool", "content": "a", "tool_name": "time"}]
    results += [{"role": "tool", "content": "b"}, {"role": "tool", "content": "c"}]
    results += [{"role": "tool", "content": "d", "tool_name": "time"}]
    ollama.chat("fake", messages=[*ASK, called, *results], tools=[TOOL])
    found = prompt_of(server)
    for text, call in (("a", "call_1 time"), ("b", "call_0 weather"), ("c", "call_2 weather")):
        assert f"{text}<result of {call}>" in found
    assert "d<result of call_3 time>" in found


class CountedName(str):
    """Count how often the name of a tool is compared with another value."""

    num_compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        self.num_compared += 1
        return str.__eq__(self, other)


def test_a_result_is_matched_without_a_look_at_every_call() -> None:
    num_others, num_results, name = 60, 20, CountedName("b")
    calls = [OllamaToolCall(OllamaCall(one, {})) for one in ["a"] * num_others + ["b"] * num_results]
    results = [OllamaMessage(role="tool", tool_name=name, content="x")] * num_results
    messages = [OllamaMessage(role="assistant", tool_calls=calls), *results]
    service = Service((ServedModel("fake", FakeEngine(), ByteTokenizer()),), lambda: (True, ""), dict)
    body = OllamaChatBody(model="fake", messages=messages)
    asked = read_ollama(body, service, ServeOptions(), b"", dropped=DroppedHistory())
    assert f"x<result of call_{num_others} b>" in bytes(asked.requests[0].prompt_ids).decode()
    # A look at every open call compares the name 1,200 times and more.
    assert 0 < name.num_compared <= 2 * num_results


def test_an_answer_has_the_form_that_is_asked_for(ollama: Client, server: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for form in ("json", schema):
        ollama.chat("fake", messages=ASK, format=form)
        assert server.engine.handles[-1].request.grammar is not None
    ollama.chat("fake", messages=ASK, format="")
    assert server.engine.handles[-1].request.grammar is None


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ("/api/chat", {"messages": [{"role": "tool", "content": "x"}]}, "no message made"),
        ("/api/chat", {"messages": [{"role": "tool", "content": "x"}] * 5000}, "has 5000 messages"),
        ("/api/chat", {"messages": [{"role": "user", "images": ["aa"]}]}, "messages[0].images"),
        ("/api/chat", {"messages": ASK, "options": {"mirostat": 2}}, "options.mirostat"),
        ("/api/chat", {"messages": ASK, "options": {"repeat_penalty": 1.3}}, "options.repeat_penalty"),
        ("/api/chat", {"messages": ASK, "options": {"temperature": "hot"}}, "options.temperature: expected"),
        ("/api/chat", {"messages": ASK, "options": {"top_p": 7}}, "options.top_p is 7"),
        ("/api/chat", {"messages": ASK, "options": {"stop": [""]}}, "options.stop has an empty"),
        ("/api/chat", {"messages": ASK, "options": {"num_predict": 0}}, "options.num_predict is 0, expected"),
        ("/api/chat", {"messages": ASK, "format": "xml"}, "format is 'xml'"),
        ("/api/chat", {"messages": ASK, "format": {"type": "string", "pattern": "("}}, "format is not a"),
        ("/api/chat", {"messages": ASK, "think": "very"}, "think is 'very', expected one of"),
        ("/api/chat", {"messages": ASK, "logprobs": True}, "logprobs"),
        ("/api/generate", {"prompt": "a", "raw": True}, "raw"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/api/generate", {"prompt": "a" * (MAX_CONTEXT + 1)}, "4096"),
    ],
)
def test_a_wrong_body_is_a_400_in_ollamas_form(
    http: httpx.Client, server: Running, path: str, body: dict[str, Any], text: str
) -> None:
    before = len(server.engine.handles)
    answer = http.post(path, json={"model": "fake", **body})
    assert answer.status_code == 400
    assert set(answer.json()) == {"error"}
    assert text in answer.json()["error"]
    assert not re.search("max_tokens|reasoning_|response_format", answer.text)
    assert len(server.engine.handles) == before


def test_an_error_of_the_engine_names_the_clients_own_field(http: httpx.Client, server: Running) -> None:
    server.engine.refuse = RequestError(
        "the prompt has 9 tokens and max_tokens is 5000, but the context holds 4096",
        param="max_tokens",
        hint="shorten the prompt or lower max_tokens",
    )
    body = {"model": "fake", "messages": ASK, "options": {"num_predict": 5000}}
    try:
        answer = http.post("/api/chat", json=body)
    finally:
        server.engine.refuse = None
    assert answer.status_code == 400
    assert answer.json()["error"] == (
        "the prompt has 9 tokens and options.num_predict is 5000, but the context holds 4096 "
        "(shorten the prompt or lower options.num_predict)"
    )


def test_models_are_listed_and_shown(ollama: Client, http: httpx.Client) -> None:
    from ollama import ResponseError

    (listed,) = ollama.list().models
    assert listed.model == "fake"
    for name in ("fake", "fake:latest"):
        shown = ollama.show(name)
        assert shown.modelinfo == {"general.architecture": "convoy", "convoy.context_length": MAX_CONTEXT}
        assert shown.capabilities == ["completion", "tools"]
    assert ollama.chat("fake:latest", messages=ASK).message.content == REPLY
    with pytest.raises(ResponseError, match="not served here") as caught:
        ollama.show("other")
    assert caught.value.status_code == 404
    assert http.get("/api/version").json()["version"]
    assert http.post("/api/show", content=b" " * 70_000).status_code == 413
    assert set(http.get("/api/pull").json()) == {"error"}


def test_a_broken_stream_ends_with_an_error_and_not_as_done() -> None:
    from ollama import ResponseError

    with serving() as running:
        running.engine.fail_after, running.engine.error = 3, StageLost("gone", public="a stage is gone")
        answer = httpx.post(f"{running.url}/api/chat", json={"model": "fake", "messages": ASK}, timeout=60.0)
        lines = [json.loads(line) for line in answer.text.splitlines()]
        assert lines[-1] == {"error": "a stage is gone"}
        assert not any(line.get("done") for line in lines)
        with pytest.raises(ResponseError, match="a stage is gone"):
            list(client_of(running).chat("fake", messages=ASK, stream=True))


def test_a_silent_stream_sends_lines_and_its_end_aborts() -> None:
    with serving(options=ServeOptions(port=0, heartbeat_s=0.05)) as running:
        running.engine.pause_after = 0
        stream = client_of(running).chat("fake", messages=ASK, stream=True)
        assert next(iter(stream)).message.content == ""
        stream.close()  # type: ignore[attr-defined]
        assert running.engine.handles[0].aborted.wait(20.0)


def test_the_keys_are_those_of_the_other_apis(tmp_path: Path) -> None:
    from ollama import ResponseError

    file, key = tmp_path / "keys.toml", "the-secret-key-of-ann"
    file.touch(mode=0o600)
    file.write_text(f'[[keys]]\nname = "ann"\nkey = "{key}"\n')
    with serving(options=ServeOptions(port=0, keys=KeyRing.open(file))) as running:
        with pytest.raises(ResponseError, match="no api key") as caught:
            client_of(running).list()
        assert caught.value.status_code == 401
        client = client_of(running, {"Authorization": f"Bearer {key}"})
        assert client.chat("fake", messages=ASK).message.content == REPLY


def test_a_stream_of_lines_is_never_kept(server: Running, http: httpx.Client) -> None:
    headers = {"convoy-resumable": "true", "last-event-id": "1-1"}
    answer = http.post("/api/chat", json={"model": "fake", "messages": ASK}, headers=headers)
    assert "id: " not in answer.text
    assert json.loads(answer.text.splitlines()[-1])["done"]
