"""Embeddings as OpenAI's client reads them, over an engine with known states."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import numpy as np
import pytest
from openai import OpenAI

from convoy.api.listen.options import ServeOptions
from convoy.errors import StageLost
from support.fake_service import MAX_CONTEXT, Running, serving, state_of

PATH = "/v1/embeddings"


def unit(text: str) -> list[float]:
    state = state_of(text.encode()).astype(np.float64)
    return list((state / np.linalg.norm(state)).astype(np.float32).tolist())


@pytest.mark.parametrize("encoding", [None, "float", "base64"])
def test_the_openai_client_reads_them(openai: OpenAI, encoding: Any) -> None:
    given: dict[str, Any] = {} if encoding is None else {"encoding_format": encoding}
    answer = openai.embeddings.create(model="fake", input=["one", "three"], **given)
    assert [one.index for one in answer.data] == [0, 1]
    assert (answer.model, answer.usage.prompt_tokens, answer.usage.total_tokens) == ("fake", 8, 8)
    found = [one.embedding for one in answer.data]
    if encoding == "base64":
        # The client decodes only what it has asked for itself.
        found = [np.frombuffer(base64.b64decode(str(one)), dtype="<f4").tolist() for one in found]
    assert found == [unit("one"), unit("three")]
    assert all(abs(np.linalg.norm(one) - 1) < 1e-6 for one in found)


@pytest.mark.parametrize(
    "given", ["abc", ["abc"], [97, 98, 99], [[97, 98, 99]]], ids=["text", "texts", "ids", "lists of ids"]
)
def test_an_input_is_text_or_token_ids(http: httpx.Client, given: object) -> None:
    answer = http.post(PATH, json={"input": given}).json()
    assert [one["embedding"] for one in answer["data"]] == [pytest.approx(unit("abc"))]
    assert answer["object"] == "list"
    assert answer["data"][0]["object"] == "embedding"


def test_the_request_samples_nothing(server: Running, http: httpx.Client) -> None:
    http.post(PATH, json={"input": "abc"})
    request = server.engine.handles[-1].request
    assert (request.embeds, request.max_tokens, request.prompt_ids) == (True, 0, (97, 98, 99))


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", "missing_required_parameter"),
        ({"input": 5}, "input", "invalid_type"),
        ({"input": None}, "input", "invalid_type"),
        ({"input": []}, "input", None),
        ({"input": ""}, "input", None),
        ({"input": ["a", ""]}, "input[1]", None),
        ({"input": ["a", 5]}, "input[1]", "invalid_type"),
        ({"input": ["a"] * 129}, "input", None),
        ({"input": "a" * (MAX_CONTEXT + 1)}, "input", "context_length_exceeded"),
        ({"input": [1] * (MAX_CONTEXT + 1)}, "input", "context_length_exceeded"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "invalid_type"),
        ({"input": "a", "dimensions": 2}, "dimensions", "unsupported_parameter"),
        ({"input": "a", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens", "unsupported_parameter"),
        ({"input": "a", "normalize": False}, "normalize", "unsupported_parameter"),
    ],
)
def test_a_wrong_body_is_refused_by_the_fields_name(
    http: httpx.Client, server: Running, body: dict[str, Any], param: str, code: str | None
) -> None:
    before = len(server.engine.handles)
    answer = http.post(PATH, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)
    assert len(server.engine.handles) == before


def test_a_whole_context_may_be_embedded_and_values_that_ask_for_nothing_pass(http: httpx.Client) -> None:
    body = {"input": [1] * MAX_CONTEXT, "dimensions": None, "normalize": True, "user": "ann"}
    assert http.post(PATH, json=body).status_code == 200


def test_another_model_is_unknown(http: httpx.Client) -> None:
    answer = http.post(PATH, json={"input": "a", "model": "other"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_a_failure_of_one_input_is_the_failure_of_all() -> None:
    with serving(options=ServeOptions(port=0)) as running:
        running.engine.refuse, running.engine.refuse_from = StageLost("gone", public="a stage is gone"), 1
        answer = httpx.post(running.url + PATH, json={"input": ["a", "b"]}, timeout=60.0)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stage_lost")
