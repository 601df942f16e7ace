"""Which fields of a request reach the engine behind a provider."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from convoy.api.body.fields import HARMLESS
from convoy.errors import RequestError
from convoy.fleet.consumer_request import read_consumer_request
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.fleet.provider.allowed import for_engine
from convoy.wire.fleet.messages import Kind
from support.fleet import MODEL, FakeEngine, FleetUnderTest, engine_server, question

Body = dict[str, Any]
CHAT: Body = {"model": MODEL, "messages": [{"role": "user", "content": "What is 1+2?"}], "max_tokens": 8}
IMAGE = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest/meta-data/"}}


def passed_on(body: Body, kind: Kind = "chat", **options: bool) -> Body:
    wanted = read_consumer_request(msgspec.json.encode(body), kind, "", {})
    found: Body = msgspec.json.decode(for_engine(wanted, shares_cache=options.get("shares_cache", False)))
    return found


MEANT_ELSEWHERE = {
    "lora",
    "reasoning_format",
}  # their harmless values may change the answer of another engine


def of_user(*parts: Body) -> Body:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def tool(parameters: Body) -> Body:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}


REFUSED: dict[str, tuple[Body, str]] = {
    "an image at an address": (
        of_user({"type": "text", "text": "What is this?"}, IMAGE),
        "messages[0].content",
    ),
    "sound": (of_user({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}), "messages[0]"),
    "an address beside text": (
        of_user({"type": "text", "text": "x", "image_url": {"url": "x"}}),
        "messages[0]",
    ),
    "a slot of llama.cpp": ({"id_slot": 0}, "id_slot"),
    "a priority": ({"priority": -5}, "priority"),
    "transfers of K/V": ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
    "a template": ({"chat_template": "{{ x }}"}, "chat_template"),
    "a template's variables": ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    "arguments of a processor": ({"mm_processor_kwargs": {}}, "mm_processor_kwargs"),
    "an adapter": ({"lora": [{"id": 0}]}, "lora"),
    "prompt embeddings": ({"prompt_embeds": "x"}, "prompt_embeds"),
    "a field of the future": ({"brand_new": 1}, "brand_new"),
    "text for a number": ({"temperature": "hot"}, "temperature"),
    "a seed of more than 64 bits": ({"seed": 1 << 64}, "seed"),
    "a seed that is no number": ({"seed": "7"}, "seed"),
    "a number of no sense": ({"top_k": 1 << 63}, "top_k"),
    "no adapter, where others may be the engine's default": ({"lora": []}, "lora"),
    "sound as an answer": ({"modalities": ["text", "audio"]}, "modalities"),
    "a function that fetches": (
        {"tools": [{"type": "function", "function": {"name": "f", "url": "http://x"}}]},
        "tools[0].function",
    ),
    "a schema elsewhere, as text": ({"guided_json": '{"$ref": "http://x"}'}, "guided_json"),
    "a form's schema elsewhere": ({"structured_outputs": {"json": {"$ref": "x"}}}, "structured_outputs"),
    "a schema elsewhere": (tool({"$ref": "http://169.254.169.254/"}), "tools"),
    "a schema elsewhere, within": (tool({"properties": [{"a": {"$ref": "file:///etc"}}]}), "tools"),
    "a format's schema elsewhere": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"$ref": "https://x"}},
            }
        },
        "response_format",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_reaches_beyond_an_answer_is_refused_with_its_field(what: str) -> None:
    changes, param = REFUSED[what]
    with pytest.raises(RequestError) as caught:
        passed_on({**CHAT, **changes})
    assert (caught.value.param or "").startswith(param)


def test_what_an_answer_is_made_of_is_passed_on_as_it_is() -> None:
    schema = {"type": "object", "$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}}
    body = {
        **CHAT,
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Add."}]},
            {"role": "user", "content": "What is 1+2?"},
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                "reasoning_content": "I add.",
            },
            {"role": "tool", "content": "3", "tool_call_id": "1"},
        ],
        **tool(schema),
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        "temperature": 0.5,
        "top_k": 3,
        "seed": (1 << 64) - 1,
        "stop": ["\n"],
        "logit_bias": {"7": 1.5},
        "logprobs": True,
        "top_logprobs": 2,
        "prompt_logprobs": 2,
        "n": 2,
        "cache_salt": "x",
        "ignore_eos": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "max",
        "continue_final_message": False,
        "add_generation_prompt": True,
    }
    assert passed_on(body) == {**body, "max_tokens": 8}


def test_a_mark_of_a_prefix_to_keep_is_taken_as_a_head_takes_it_and_is_left_out() -> None:
    marked = {"type": "text", "text": "Add.", "cache_control": {"type": "ephemeral"}}
    assert passed_on({**CHAT, **of_user(marked)})["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "Add."}]}
    ]


@pytest.mark.parametrize(
    "form",
    [
        {"structured_outputs": {"regex": "a+"}},
        {"guided_json": {"type": "object"}},
        {"guided_json": '{"type": "object"}'},
        {"guided_choice": ["a", "b"]},
        {"grammar": 'root ::= "a"'},
        {"json_schema": {"type": "object"}},
        {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
    ],
)
@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_the_form_of_an_answer_is_passed_on(form: Body, kind: Kind) -> None:
    prompt = CHAT if kind == "chat" else {"model": MODEL, "prompt": "x", "max_tokens": 8}
    assert passed_on({**prompt, **form}, kind) == {**prompt, **form}


def test_of_the_tools_of_a_chat_only_functions_are_passed_on() -> None:
    own, other = tool({"type": "object"})["tools"][0], {"type": "web_search", "url": "http://x"}
    assert passed_on({**CHAT, "tools": [other, own]})["tools"] == [own]
    assert passed_on({**CHAT, "tools": [other], "tool_choice": "required"}) == CHAT


def test_of_a_responses_request_only_text_and_own_tools_are_passed_on() -> None:
    image = {"type": "input_image", "image_url": "http://169.254.169.254/"}
    own = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Add."}]},
        {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "convoy.eA=="},
        {"type": "function_call", "call_id": "1", "name": "f", "namespace": "n", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "3"},
    ]
    body = {
        "model": MODEL,
        "input": [*items, {"type": "message", "role": "user", "content": [image]}, {"type": "compaction"}],
        "instructions": "Be brief.",
        "max_output_tokens": 8,
        "tools": [
            own,
            {"type": "namespace", "name": "n", "tools": [own, {"type": "mcp", "server_url": "http://x"}]},
            {"type": "mcp", "server_url": "http://169.254.169.254/"},
        ],
        "tool_choice": {"type": "function", "name": "f", "namespace": "n"},
        "text": {"format": {"type": "json_object"}, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content", "file_search_call.results"],
        "client_metadata": {"a": "b"},
        "metadata": {"a": "b"},
        "user": "ann",
        "background": True,
        "store": True,
        "cache_salt": "x",
    }
    passed = passed_on(body, "responses")
    assert "169.254" not in msgspec.json.encode(passed).decode()
    assert passed == {
        "model": MODEL,
        "input": [
            *items,
            {"type": "message", "role": "user", "content": [{"type": "input_image"}]},
            {"type": "compaction"},
        ],
        "instructions": "Be brief.",
        "max_output_tokens": 8,
        "tools": [own, {"type": "namespace", "name": "n", "tools": [own]}],
        "tool_choice": body["tool_choice"],
        "text": {"format": {"type": "json_object"}},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "store": False,
        "cache_salt": "x",
    }
    assert "cache_salt" not in passed_on(body, "responses", shares_cache=True)


def test_an_engine_is_told_a_limit_of_a_responses_request_that_names_none() -> None:
    body = {"model": MODEL, "input": "hi", "max_tokens": 3, "tools": [{"type": "mcp"}]}
    passed = passed_on({**body, "tool_choice": "required"}, "responses")
    assert passed == {"model": MODEL, "input": "hi", "max_output_tokens": 1024, "store": False}


@pytest.mark.parametrize("schema", [{"$ref": "https://x"}, {"properties": {"a": {"$ref": "file:///etc"}}}])
def test_no_schema_of_a_responses_request_refers_elsewhere(schema: Body) -> None:
    function = {"type": "function", "name": "f", "parameters": schema}
    for changes in (
        {"tools": [function]},
        {"tools": [{"type": "namespace", "name": "n", "tools": [function]}]},
        {"text": {"format": {"type": "json_schema", "schema": schema}}},
    ):
        with pytest.raises(RequestError, match="does not begin with"):
            passed_on({"model": MODEL, "input": "hi", **changes}, "responses")


def test_the_prompt_of_a_count_is_passed_on_without_what_asks_for_an_answer() -> None:
    chat = {"model": MODEL, "messages": CHAT["messages"]}
    asked = {**chat, "max_tokens": 8, "stream": True, "temperature": 1}
    assert passed_on(asked, "count_tokens") == chat
    own = tool({"type": "object"})
    assert passed_on({**asked, **own, "return_token_strs": True}, "tokenize") == {
        **chat,
        **own,
        "return_token_strs": True,
    }
    assert passed_on({"model": MODEL, "tokens": [1, 2], "stream": True}, "detokenize") == {
        "model": MODEL,
        "tokens": [1, 2],
    }


def test_of_a_messages_request_only_text_and_own_tools_are_passed_on() -> None:
    image = {"type": "image", "source": {"type": "url", "url": "http://169.254.169.254/"}}
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "3"}, image]}
    own = {"name": "f", "input_schema": {"type": "object"}}
    body = {
        "model": MODEL,
        "max_tokens": 8,
        "system": [{"type": "text", "text": "Add.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}],
        "tools": [own, {"type": "web_fetch_20250910", "name": "web_fetch"}],
        "mcp_servers": [{"type": "url", "url": "http://169.254.169.254/"}],
        "thinking": {"type": "adaptive", "display": "omitted"},
        "cache_salt": "x",
    }
    passed = passed_on(body, "messages")
    assert "169.254" not in msgspec.json.encode(passed).decode()
    assert passed == {
        "model": MODEL,
        "max_tokens": 8,
        "system": [{"type": "text", "text": "Add."}],
        "messages": [
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [{**result, "content": [result["content"][0], {"type": "image"}]}]},
        ],
        "tools": [own],
        "thinking": {"type": "adaptive"},
        "cache_salt": "x",
    }
    assert "cache_salt" not in passed_on(body, "messages", shares_cache=True)


@pytest.mark.parametrize(
    ("choice", "kept"),
    [
        ({"type": "any"}, False),
        ({"type": "tool", "name": "s"}, False),
        ({"type": "tool", "name": "other"}, True),
        ({"type": "auto"}, True),
    ],
)
def test_nothing_is_required_of_an_engine_if_every_tool_was_left_out(choice: Body, kept: bool) -> None:
    body = {**CHAT, "tools": [{"type": "web_search_20250305", "name": "s"}], "tool_choice": choice}
    passed = passed_on(body, "messages")
    assert "tools" not in passed
    assert ("tool_choice" in passed) == kept


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages"),
        ({"tools": [{"name": "f", "input_schema": {"$ref": "https://x"}}]}, "tools"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"$ref": "https://x"}}}},
            "output_config",
        ),
    ],
)
def test_a_messages_request_that_cannot_be_passed_on_is_refused_by_its_field(
    changes: Body, param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        passed_on({**CHAT, **changes}, "messages")
    assert (caught.value.param or "").startswith(param)


@pytest.mark.parametrize("prompt", ["text", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_each_form_of_a_prompt_is_passed_on(prompt: object) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "echo": True, "logprobs": 1, "suffix": "."}
    assert passed_on(body, "completion") == body


def test_what_is_nobodys_business_and_what_is_null_is_left_out() -> None:
    body = {**CHAT, "user": "ann", "metadata": {"a": "b"}, "store": True, "tools": None, "id_slot": None}
    assert passed_on(body) == CHAT
    message = {**CHAT["messages"][0], "refusal": None, "annotations": [IMAGE]}
    assert passed_on({**CHAT, "messages": [message]}) == CHAT


@pytest.mark.parametrize("seed", [-(1 << 63), 1 << 63, (1 << 64) - 1])
def test_each_seed_that_a_head_serves_is_passed_on(seed: int) -> None:
    assert passed_on({**CHAT, "seed": seed})["seed"] == seed


@pytest.mark.parametrize(
    "asked",
    [
        {"add_special_tokens": False},
        {"return_token_ids": True},
        {"request_id": "7"},
        *(
            {name: value}
            for name, values in HARMLESS.items()
            for value in values
            if name not in MEANT_ELSEWHERE
        ),
    ],
    ids=repr,
)
def test_what_asks_a_head_for_nothing_is_no_error_behind_a_coordinator(asked: Body) -> None:
    assert passed_on({**CHAT, **asked}) in (CHAT, {**CHAT, **asked})


def test_a_stream_asks_for_its_counts_and_a_shared_cache_gets_no_salt() -> None:
    found = passed_on({**CHAT, "stream": True, "cache_salt": "x"}, shares_cache=True)
    assert found == {**CHAT, "stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, engine: FakeEngine) -> Iterator[FleetUnderTest]:
    folder: Path = tmp_path_factory.mktemp("fleet")
    made = FleetUnderTest(folder, CoordinatorOptions(instance="test"))
    with engine_server(engine) as url:
        made.add("one", url)
        yield made
        made.close()


@pytest.mark.parametrize("stream", [False, True])
def test_whoever_asks_is_told_the_field_and_the_engine_hears_nothing(
    fleet: FleetUnderTest, engine: FakeEngine, stream: bool
) -> None:
    before = fleet.ledger.balance("ann")
    with fleet.client() as client:
        answer = client.post("/v1/chat/completions", json=question(1, 2, stream=stream, **of_user(IMAGE)))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith("messages[0].content")
        assert engine.bodies == []
        assert fleet.ledger.balance("ann") == before
