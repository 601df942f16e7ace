"""/v1/completions: prompts in every form, echo and scores, as lm-eval and others ask for them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai import OpenAI

from convoy.errors import QueueFull
from support.fake_service import EOS, REPLY, FakeEngine, Running, events, serving

TOKENS = list(b"abc")


def post(http: httpx.Client, **body: object) -> Any:
    answer = http.post("/v1/completions", json={"model": "fake", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_openai_client_completes_and_streams(openai: OpenAI) -> None:
    answer = openai.completions.create(model="fake", prompt="abc")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (REPLY, "stop")
    assert answer.object == "text_completion"
    stream = openai.completions.create(model="fake", prompt="abc", stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == REPLY
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("prompt", ["abc", TOKENS, ["abc"], [TOKENS]])
def test_text_and_token_ids_are_the_same_prompt(server: Running, http: httpx.Client, prompt: object) -> None:
    post(http, prompt=prompt, max_tokens=1)
    assert server.engine.handles[-1].request.prompt_ids == tuple(TOKENS)


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_several_prompts_are_numbered_prompt_major(stream: bool) -> None:
    with serving(FakeEngine(lambda request: bytes(request.prompt_ids).decode() + "!")) as running:
        body = {"prompt": ["a", "b", "c"], "n": 2, "stream": stream}
        answer = httpx.post(f"{running.url}/v1/completions", json=body)
        texts = dict.fromkeys(range(6), "")
        if stream:
            for event in events(answer.text)[:-1]:
                choice = event["choices"][0]
                texts[choice["index"]] += choice["text"]
        else:
            texts = {choice["index"]: choice["text"] for choice in answer.json()["choices"]}
            usage = {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15}
            assert answer.json()["usage"] == {**usage, "prompt_tokens_details": {"cached_tokens": 0}}
        assert [texts[i] for i in range(6)] == ["a!", "a!", "b!", "b!", "c!", "c!"]


def test_echo_puts_the_prompt_before_the_answer(http: httpx.Client) -> None:
    for prompt in ("abc", TOKENS):
        assert post(http, prompt=prompt, echo=True)["choices"][0]["text"] == "abc" + REPLY


def test_echo_with_logprobs_scores_the_prompt_as_lm_eval_reads_it(
    server: Running, http: httpx.Client
) -> None:
    body = {"prompt": [TOKENS, list(b"xy")], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    choices = post(http, **body, seed=1234)["choices"]
    logprobs = choices[0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c", "T"]
    assert logprobs["token_logprobs"] == [None, -0.098, -0.099, -0.084]
    assert logprobs["top_logprobs"] == [None, {"b": -0.098}, {"c": -0.099}, {"T": -0.084}]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    # lm-eval: the answer's one token is dropped, the context's too, and greedy means equal to the best.
    scored = list(zip(logprobs["token_logprobs"][1:-1], logprobs["top_logprobs"][1:-1], strict=True))
    assert len(scored) == 2
    assert all(logprob == max(top.values()) for logprob, top in scored)
    assert choices[1]["logprobs"]["tokens"] == ["x", "y", "T"]
    assert server.engine.handles[-1].request.prompt_logprobs == 1


def test_a_scored_prompt_has_its_one_token_even_where_the_text_ends() -> None:
    with serving(FakeEngine("")) as running:
        body = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 1}
        choice = httpx.post(f"{running.url}/v1/completions", json=body).json()["choices"][0]
        assert running.engine.handles[-1].request.ignore_eos
        assert choice["text"] == "abc"
        assert choice["finish_reason"] == "stop"
        assert len(choice["logprobs"]["tokens"]) == 4
        assert choice["logprobs"]["token_logprobs"][-1] == -EOS / 1000


@pytest.mark.parametrize("prompt", ["abc", "a"])
def test_a_streamed_echo_says_what_the_whole_answer_says(http: httpx.Client, prompt: str) -> None:
    body = {"model": "fake", "prompt": prompt, "echo": True, "logprobs": 2, "n": 2, "max_tokens": 4}
    whole = post(http, **body)["choices"]
    streamed = events(http.post("/v1/completions", json={**body, "stream": True}).text)[:-1]
    for index in range(2):
        parts = [e["choices"][0] for e in streamed if e["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == whole[index]["text"] == prompt + "The "
        for key, values in whole[index]["logprobs"].items():
            assert [v for part in parts if part["logprobs"] for v in part["logprobs"][key]] == values


def test_zero_logprobs_still_give_the_chosen_token(http: httpx.Client) -> None:
    logprobs = post(http, prompt="abc", logprobs=0, max_tokens=2)["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-0.084, -0.104]
    assert logprobs["top_logprobs"] == [{"T": -0.084}, {"h": -0.104}]


def test_offsets_count_characters_not_bytes() -> None:
    with serving(FakeEngine("aé!")) as running:
        answer = httpx.post(
            f"{running.url}/v1/completions", json={"prompt": "ü", "logprobs": 0, "echo": True}
        )
        logprobs = answer.json()["choices"][0]["logprobs"]
        assert answer.json()["choices"][0]["text"] == "üaé!"
        assert logprobs["text_offset"] == [0, 0, 1, 2, 2, 3]


def test_the_first_refused_prompt_ends_the_others() -> None:
    with serving() as running:
        engine = running.engine
        engine.pause_after, engine.refuse, engine.refuse_from = 1, QueueFull("8 requests wait"), 2
        answer = httpx.post(f"{running.url}/v1/completions", json={"prompt": ["a", "b", "c"]})
        assert answer.status_code == 429
        assert all(handle.aborted.wait(10) for handle in engine.handles)
