"""/tokenize and /detokenize over a real socket, in vLLM's shapes."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.api.keys.keys import KeyRing
from convoy.api.listen.options import ServeOptions
from convoy.api.openai.tokenize import detokenize, tokenize
from convoy.api.service import ServedModel, Service
from convoy.api.telemetry.dropped import DroppedHistory
from convoy.model.checkpoints.source import ModelSource
from convoy.model.text.tokens import Tokenizer
from support.fake_service import EOS, MAX_CONTEXT, FakeEngine, Running, serving
from support.scraping import scrape

ASK = [{"role": "user", "content": "hi"}]


def test_a_prompt_is_shown_as_its_tokens(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"model": "fake", "prompt": "né"})
    assert answer.json() == {
        "count": 3,
        "max_model_len": MAX_CONTEXT,
        "tokens": [0x6E, 0xC3, 0xA9],
        "token_strs": None,
    }


def test_token_strings_show_the_bytes_of_a_part_of_a_character(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "né", "return_token_strs": True})
    assert answer.json()["token_strs"] == ["n", r"bytes:\xc3", r"bytes:\xa9"]


def test_a_chat_is_shown_with_its_template_as_the_engine_gets_it(server: Running, http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"messages": ASK}).json()["tokens"]
    assert bytes(tokens).decode() == "<user>hi<assistant>"
    http.post("/v1/chat/completions", json={"messages": ASK, "max_tokens": 1})
    assert list(server.engine.handles[-1].request.prompt_ids) == tokens


def test_a_chat_may_end_without_the_opening_of_an_answer(http: httpx.Client) -> None:
    body = {"messages": ASK, "add_generation_prompt": False}
    assert bytes(http.post("/tokenize", json=body).json()["tokens"]).decode() == "<user>hi"


def test_fields_of_an_answer_are_ignored_here(http: httpx.Client) -> None:
    for body in ({"prompt": "a"}, {"messages": ASK}):
        answer = http.post("/tokenize", json={**body, "temperature": 0, "max_tokens": 3, "stream": True})
        assert answer.status_code == 200
        assert answer.json()["count"] == len(answer.json()["tokens"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "a", "messages": ASK}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": ASK, "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": ASK, "continue_final_message": True}, "continue_final_message"),
        ({"messages": ASK, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": ASK, "tools": [{"type": "function"}]}, "tools[0].function"),
        ({"prompt": "a", "add_special_tokens": 3}, "add_special_tokens"),
        ({"prompt": "a" * (MAX_CONTEXT + 1)}, "prompt"),
        ({"messages": [{"role": "user", "content": "a" * 270_000}]}, "messages"),
    ],
)
def test_a_bad_body_is_refused_by_its_field(http: httpx.Client, body: dict[str, object], param: str) -> None:
    answer = http.post("/tokenize", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_tokens_are_shown_as_text_with_special_tokens(http: httpx.Client) -> None:
    answer = http.post("/detokenize", json={"model": "fake", "tokens": [0x6E, 0xC3, 0xA9, EOS]})
    assert answer.json() == {"prompt": "né</s>"}
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("tokens", "param"),
    [
        (None, "tokens"),
        ("abc", "tokens"),
        ([1, "a"], "tokens[1]"),
        ([1, -1], "tokens[1]"),
        ([EOS + 1], "tokens[0]"),
        ([1] * (MAX_CONTEXT + 1), "tokens"),
    ],
)
def test_bad_tokens_are_refused_by_their_field(http: httpx.Client, tokens: object, param: str) -> None:
    answer = http.post("/detokenize", json={"tokens": tokens})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_an_unknown_model_is_not_found(http: httpx.Client) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        answer = http.post(path, json={"model": "other", **body})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=200))
def test_text_comes_back_from_its_tokens(server: Running, text: str) -> None:
    tokens = httpx.post(f"{server.url}/tokenize", json={"prompt": text}).json()["tokens"]
    assert httpx.post(f"{server.url}/detokenize", json={"tokens": tokens}).json() == {"prompt": text}


def test_a_bundled_models_control_tokens_come_back_by_name() -> None:
    tokenizer = Tokenizer(ModelSource.resolve("demo-mini"))
    model = ServedModel("demo-mini", FakeEngine(), tokenizer)
    service = Service((model,), lambda: (True, ""), dict)
    try:
        body = json.dumps({"messages": ASK, "return_token_strs": True}).encode()
        chat = tokenize(body, service, ServeOptions(), dropped=DroppedHistory())
        text = detokenize(json.dumps({"tokens": chat.tokens}).encode(), service, ServeOptions()).prompt
    finally:
        tokenizer.close()
    assert chat.tokens == tokenizer.encode_chat(ASK)
    assert chat.token_strs is not None
    assert text == "".join(chat.token_strs)
    assert tokenizer.decode(chat.tokens) != text
    assert "hi" in text


def test_a_key_is_needed_and_its_requests_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.touch(mode=0o600)
    file.write_text('[[keys]]\nname = "ann"\nkey = "the-secret-key-of-ann"\nrequests_per_minute = 2\n')
    options = ServeOptions(port=0, keys=KeyRing.open(file))
    headers = {"authorization": "Bearer the-secret-key-of-ann"}
    with serving(FakeEngine(), options) as running, httpx.Client(base_url=running.url) as client:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            assert client.post(path, json=body).status_code == 401
            assert client.post(path, json=body, headers=headers).status_code == 200
        refused = client.post("/tokenize", json={"prompt": "a"}, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert (
            scrape(f"{running.url}/metrics", "the-secret-key-of-ann")(
                "convoy_key_tokens_total", key="ann", kind="prompt"
            )
            == 0
        )
        assert running.engine.handles == []
