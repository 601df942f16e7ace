"""The fields that give an answer its form reach the engine as one compiled grammar, or are refused."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from convoy.engine.requests.request import GenerationRequest
from support.fake_service import EOS, Running

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    TEXT: {"prompt": "a"},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
UNSUPPORTED = {"type": "array", "uniqueItems": True}


def asked(server: Running, path: str, **fields: Any) -> GenerationRequest:
    answer = httpx.post(f"{server.url}{path}", json=BODIES[path] | fields, timeout=60.0)
    assert answer.status_code == 200, answer.text
    return server.engine.handles[-1].request


def refused(server: Running, path: str, **fields: Any) -> dict[str, Any]:
    before = len(server.engine.handles)
    answer = httpx.post(f"{server.url}{path}", json=BODIES[path] | fields, timeout=60.0)
    assert answer.status_code == 400, answer.text
    assert len(server.engine.handles) == before, "nothing is queued"
    error: dict[str, Any] = answer.json()["error"]
    return error


def takes(request: GenerationRequest, text: str) -> bool:
    """Return whether the request's grammar takes all of ``text`` as a whole answer."""
    assert request.grammar is not None
    matcher = request.grammar.matcher()
    tokens = [*text.encode(), EOS]
    return matcher.allowed_start(tokens) == len(tokens)


FORMS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_object"}}, '{"b": [1]}', "[1]"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, '{"a": 1}', '{"a": "b"}'),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        '{"a": 1}',
        "{}",
    ),
    ({"structured_outputs": {"json": SCHEMA}}, '{"a": 1}', "{}"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, '{"a": 1}', "{}"),
    ({"structured_outputs": {"regex": "[ab]+"}}, "abba", "abc"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes", "maybe"),
    ({"structured_outputs": {"grammar": 'start: "a" "b"'}}, "ab", "a"),
    ({"structured_outputs": {"json_object": True}}, "{}", "1"),
    ({"guided_json": SCHEMA}, '{"a": 1}', "{}"),
    ({"guided_regex": "[ab]+"}, "abba", "abc"),
    ({"guided_choice": ["yes", "no"]}, "no", "maybe"),
    ({"guided_grammar": 'root ::= "a" [0-9]'}, "a7", "a"),
    ({"grammar": 'root ::= "a" [0-9]'}, "a7", "a"),
    ({"json_schema": SCHEMA}, '{"a": 1}', "{}"),
]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("fields", "good", "bad"), FORMS, ids=[json.dumps(form[0])[:60] for form in FORMS])
def test_a_form_reaches_the_engine(
    server: Running, path: str, fields: dict[str, Any], good: str, bad: str
) -> None:
    request = asked(server, path, **fields)
    assert takes(request, good)
    assert not takes(request, bad)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None, "guided_json": None, "structured_outputs": None, "grammar": ""},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"grammar_lazy": False, "grammar_triggers": []},
    ],
    ids=json.dumps,
)
def test_a_body_that_asks_for_no_form_has_none(server: Running, fields: dict[str, Any]) -> None:
    assert asked(server, CHAT, **fields).grammar is None


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex", "guided_json and guided_regex both"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "both give"),
        ({"guided_json": UNSUPPORTED}, "guided_json", "cannot be enforced: uniqueItems"),
        ({"structured_outputs": {"json": UNSUPPORTED}}, "structured_outputs.json", "uniqueItems"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "is 'xml', expected one of: text"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "is missing"),
        ({"guided_regex": "(("}, "guided_regex", "not a regular expression that can be enforced"),
        ({"guided_regex": "a?" * 2500}, "guided_regex", "has 5000 bytes, and the limit is 4096"),
        ({"guided_choice": []}, "guided_choice", "expected at least one"),
        ({"grammar": "root ::= (("}, "grammar", "not a GBNF grammar"),
        (
            {"structured_outputs": {"whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "support",
        ),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not support"),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_a_form_that_cannot_be_had_is_refused_by_its_field(
    server: Running, fields: dict[str, Any], param: str, words: str
) -> None:
    error = refused(server, CHAT, **fields)
    assert error["param"] == param
    assert words in error["message"]


def test_only_a_strict_response_format_refuses_a_keyword_that_cannot_be_enforced(server: Running) -> None:
    def form(**strict: bool) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"name": "x", "schema": UNSUPPORTED, **strict}}

    error = refused(server, CHAT, response_format=form(strict=True))
    assert (error["code"], error["param"]) == ("unsupported_schema", "response_format.json_schema.schema")
    assert 'leave it out, or set "strict" to false' in error["message"]
    # This field has no flag to set.
    error = refused(server, CHAT, guided_json=UNSUPPORTED)
    assert error["message"].endswith("(leave it out)")
    assert takes(asked(server, CHAT, response_format=form()), "[1, 1]")


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_cache_salt_divides_the_compiled_grammars_of_one_key(server: Running, path: str) -> None:
    def grammar(**fields: Any) -> object:
        return asked(server, path, guided_regex="[ab]+", **fields).grammar

    plain, first = grammar(), grammar(cache_salt="first")
    assert grammar() is plain
    assert grammar(cache_salt="first") is first is not plain
    assert grammar(cache_salt="second") not in (plain, first)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "reasoning_content"),
        ({"guided_regex": "The.*"}, "reasoning_content"),
        ({"guided_grammar": "start: /The.*/"}, "content"),
        ({"grammar": 'root ::= "The" .*'}, "content"),
    ],
    ids=json.dumps,
)
def test_an_answer_in_a_grammar_of_its_own_has_no_reasoning(
    server: Running, fields: dict[str, Any], field: str
) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm"},
    ]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False, **fields}
    answer = httpx.post(f"{server.url}{CHAT}", json=body, timeout=60.0)
    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    assert {name for name in ("content", "reasoning_content") if message.get(name)} == {field}


def test_an_answer_in_a_json_form_may_call_a_tool_instead(server: Running) -> None:
    call = '<tool_call>\n{"name": "read", "arguments": {"a": 1}}\n</tool_call>'

    def with_tool(parameters: dict[str, Any], **more: Any) -> GenerationRequest:
        tool = {"type": "function", "function": {"name": "read", "parameters": parameters, "strict": True}}
        return asked(server, CHAT, response_format={"type": "json_object"}, tools=[tool], **more)

    either = with_tool(SCHEMA)
    assert takes(either, call)
    assert takes(either, '{"b": 1}')
    assert not takes(either, "[1]")
    # A tool that cannot be compiled, or that may not be called, leaves the form alone.
    odd = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(("}}}
    for alone in (with_tool(odd), with_tool(SCHEMA, tool_choice="none")):
        assert takes(alone, '{"b": 1}')
        assert not takes(alone, call)
