"""Tools and reasoning on /v1/chat/completions: the real client over a real socket, and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from support.fake_service import FakeEngine, Running, serving

CHAT = "/v1/chat/completions"
ASK: list[Any] = [{"role": "user", "content": "Read notes.txt."}]
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "read", "description": "Read a file.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "list"}},
]
ARGUMENTS = '{"path": "notes.txt", "lines": [1, {"to": 2}]}'
REPLY = (
    "<think>\nI need the file.\n</think>\n\nLet me look.\n"
    f'<tool_call>\n{{"name": "read", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"arguments": {}, "name": "list"}\n</tool_call>'
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(FakeEngine(REPLY)) as running:
        yield running


@pytest.fixture(scope="module")
def openai(server: Running) -> Iterator[OpenAI]:
    url = f"{server.url}/v1"
    # The client checks every field of an answer against its own types.
    with OpenAI(
        base_url=url, api_key="unused", max_retries=0, timeout=60.0, _strict_response_validation=True
    ) as client:
        yield client


def test_a_whole_answer_has_reasoning_text_and_calls(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(model="fake", messages=ASK, tools=TOOLS)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    assert choice.message.to_dict()["reasoning_content"] == "I need the file."
    calls: Any = choice.message.tool_calls
    assert [(call.type, call.function.name) for call in calls] == [("function", "read"), ("function", "list")]
    assert [call.function.arguments for call in calls] == [ARGUMENTS, "{}"]
    assert len({call.id for call in calls}) == 2


def test_a_stream_has_the_same_in_pieces_that_never_interleave(openai: OpenAI) -> None:
    stream = openai.chat.completions.create(model="fake", messages=ASK, tools=TOOLS, stream=True)
    text, reasoning, reason = "", "", None
    calls: list[tuple[str, str, str, list[str]]] = []
    kinds: list[str] = []
    for chunk in stream:
        delta: dict[str, Any] = chunk.choices[0].delta.to_dict()
        reason = chunk.choices[0].finish_reason or reason
        text += delta.get("content") or ""
        reasoning += delta.get("reasoning_content") or ""
        kinds += [name for name in ("content", "reasoning_content", "tool_calls") if delta.get(name)]
        for call in delta.get("tool_calls") or []:
            if call["index"] == len(calls):
                calls.append((call["id"], call["type"], call["function"]["name"], []))
            calls[call["index"]][3].append(call["function"]["arguments"])
    assert (text, reasoning, reason) == ("Let me look.", "I need the file.", "tool_calls")
    assert [(kind, name, "".join(parts)) for _, kind, name, parts in calls] == [
        ("function", "read", ARGUMENTS),
        ("function", "list", "{}"),
    ]
    assert len({number for number, *_ in calls}) == 2
    # Several pieces of arguments, and each kind once.
    assert len(calls[0][3]) > 10
    assert list(dict.fromkeys(kinds)) == ["reasoning_content", "content", "tool_calls"]


def test_a_message_that_only_calls_has_no_content() -> None:
    with serving(FakeEngine('<tool_call>{"name": "list", "arguments": {}}</tool_call>')) as running:
        answer = httpx.post(f"{running.url}{CHAT}", json={"messages": ASK, "tools": TOOLS}).json()
    message = answer["choices"][0]["message"]
    assert message["content"] is None
    assert "reasoning_content" not in message
    assert message["tool_calls"][0]["function"] == {"name": "list", "arguments": "{}"}


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_a_call_is_text(http: httpx.Client, more: dict[str, Any]) -> None:
    choice = http.post(CHAT, json={"messages": ASK, **more}).json()["choices"][0]
    assert choice["message"]["content"].startswith("Let me look.\n<tool_call>")
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


def test_an_answer_that_is_cut_ends_with_length(http: httpx.Client) -> None:
    body = {"messages": ASK, "tools": TOOLS, "max_tokens": len(REPLY) - 30}
    choice = http.post(CHAT, json=body).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS


def test_a_stop_string_ends_the_text_before_a_call(http: httpx.Client) -> None:
    body = {"messages": ASK, "tools": TOOLS, "stop": ["look"]}
    choice = http.post(CHAT, json=body).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"].startswith("Let me ")
    assert "tool_calls" not in choice["message"]


def test_a_conversation_with_calls_and_results_reaches_the_template(server: Running) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path":"a"}'}}
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "reasoning_content": "why", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "text of a"}]},
    ]
    answer = httpx.post(
        f"{server.url}{CHAT}",
        json={"messages": messages, "reasoning_effort": "none", "chat_template_kwargs": {"x": [1]}},
    )
    assert answer.status_code == 200, answer.text
    prompt = bytes(server.engine.handles[-1].request.prompt_ids).decode()
    assert prompt.endswith(
        '<assistant><think>why</think><call c1 read>{"path":"a"}<tool>text of a<result of c1 read><assistant>'
    )
    variables = json.loads(prompt.removeprefix("<variables>").partition("<user>")[0])
    assert variables == {"reasoning_effort": "none", "enable_thinking": False, "thinking": False, "x": [1]}


def test_a_final_message_may_be_continued(server: Running) -> None:
    messages = [*ASK, {"role": "assistant", "content": "It says"}]
    for field in ({"continue_final_message": True}, {"add_generation_prompt": False}):
        answer = httpx.post(f"{server.url}{CHAT}", json={"messages": messages, **field})
        assert answer.status_code == 200, answer.text
        assert bytes(server.engine.handles[-1].request.prompt_ids).endswith(b"<assistant>It says")


def called(**changes: Any) -> dict[str, Any]:
    function = {"name": "read", "arguments": "{}", **changes}
    return {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function}]}


def tool(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "read", **changes}}


def deep(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


RESULT = {"role": "tool", "tool_call_id": "c1", "content": "x"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": [*ASK, RESULT]}, "messages[1].tool_call_id"),
    ({"messages": [*ASK, called(), RESULT | {"tool_call_id": "c2"}]}, "messages[2].tool_call_id"),
    ({"messages": [*ASK, called(), {"role": "tool", "content": "x"}]}, "messages[2].tool_call_id"),
    (
        {"messages": [*ASK, called(arguments=json.dumps({"a": "x" * 600_000}))]},
        "messages[1].tool_calls[0].function.arguments",
    ),
    (
        {"messages": [*ASK, called(arguments=json.dumps(deep(100)))]},
        "messages[1].tool_calls[0].function.arguments",
    ),
    ({"messages": [*ASK, called(name="")]}, "messages[1].tool_calls[0].function.name"),
    ({"messages": [{**called(), "role": "user", "content": "x"}]}, "messages[0].tool_calls"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [tool(name="")]}, "tools[0].function.name"),
    ({"tools": [tool(name="a b")]}, "tools[0].function.name"),
    ({"tools": [tool(), tool()]}, "tools[1].function.name"),
    ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters=deep(100))]}, "tools[0].function.parameters"),
    ({"tools": [tool(name=f"t{i}") for i in range(600)]}, "tools"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "write"}}},
        "tool_choice.function.name",
    ),
    ({"chat_template_kwargs": {"a": deep(100)}}, "chat_template_kwargs"),
    ({"messages": [*ASK, called()], "continue_final_message": True}, "continue_final_message"),
]


@pytest.mark.parametrize(("body", "param"), WRONG)
def test_a_wrong_tool_or_call_is_named_and_nothing_runs(
    server: Running, http: httpx.Client, body: dict[str, Any], param: str
) -> None:
    before = len(server.engine.handles)
    answer = http.post(CHAT, json={"messages": ASK, **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert len(server.engine.handles) == before


@pytest.mark.parametrize("arguments", ["{", "[]", '{"a": NaN}', "[" * 100_000])
def test_a_call_whose_arguments_are_no_object_is_left_out_with_its_result(arguments: str) -> None:
    with serving() as running:
        after = {"role": "user", "content": "and now?"}
        messages = [*ASK, called(arguments=arguments), RESULT, after, called(), RESULT | {"content": "kept"}]
        answer = httpx.post(f"{running.url}{CHAT}", json={"messages": messages, "tools": TOOLS})
        metrics = httpx.get(f"{running.url}/metrics").text
        prompt = bytes(running.engine.handles[-1].request.prompt_ids).decode()
    assert answer.status_code == 200, answer.text
    assert prompt.count("<call c1 read>{}") == 1
    assert prompt.count("kept") == 1
    assert 'convoy_http_dropped_blocks_total{api="chat",type="other"} 2.0' in metrics


def test_a_conversation_of_broken_calls_alone_is_refused(http: httpx.Client) -> None:
    answer = http.post(CHAT, json={"messages": [called(arguments="{"), RESULT], "tools": TOOLS})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"


def test_tools_of_other_types_are_left_out(server: Running, http: httpx.Client) -> None:
    answer = http.post(CHAT, json={"messages": ASK, "tools": [{"type": "web_search"}, *TOOLS]})
    assert answer.status_code == 200
    assert b"web_search" not in bytes(server.engine.handles[-1].request.prompt_ids)


def test_nothing_is_required_if_every_tool_was_left_out(server: Running, http: httpx.Client) -> None:
    body = {"messages": ASK, "tools": [{"type": "web_search"}], "tool_choice": "required"}
    answer = http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    assert server.engine.handles[-1].request.grammar is None
    assert http.post(CHAT, json=body | {"tools": []}).status_code == 400


NAMED = {"type": "function", "function": {"name": "read"}}


@pytest.mark.parametrize(
    ("choice", "allowed", "refused"),
    [
        ("required", ['{"name": "read"', '{"name": "list"'], ['{"name": "write"', "Hello"]),
        (NAMED, ['{"name": "read"'], ['{"name": "list"', "Hello"]),
    ],
)
def test_a_forced_call_is_the_engines_grammar(
    server: Running, http: httpx.Client, choice: object, allowed: list[str], refused: list[str]
) -> None:
    answer = http.post(CHAT, json={"messages": ASK, "tools": TOOLS, "tool_choice": choice})
    assert answer.status_code == 200, answer.text
    grammar = server.engine.handles[-1].request.grammar
    assert grammar is not None
    for text in [f"<tool_call>\n{call}" if call.startswith("{") else call for call in allowed + refused]:
        matcher = grammar.matcher()
        follows = all(matcher.consume(token) for token in text.encode())
        assert follows == text.endswith(tuple(allowed)), text


def test_a_tool_that_may_be_called_has_no_grammar(server: Running, http: httpx.Client) -> None:
    assert http.post(CHAT, json={"messages": ASK, "tools": TOOLS}).status_code == 200
    assert server.engine.handles[-1].request.grammar is None


def test_a_strict_schema_that_cannot_be_kept_is_refused_where_a_call_is_forced(
    server: Running, http: httpx.Client
) -> None:
    before = len(server.engine.handles)
    odd = {"type": "object", "properties": {}, "dependentSchemas": {"a": {}}}
    tools = [tool(parameters=odd, strict=True)]
    answer = http.post(CHAT, json={"messages": ASK, "tools": tools, "tool_choice": "required"})
    assert answer.status_code == 400
    assert (answer.json()["error"]["param"], len(server.engine.handles)) == ("tools", before)
