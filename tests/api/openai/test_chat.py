"""/v1/chat/completions with the real client and by hand, over a real socket."""

from __future__ import annotations

import httpx
import pytest
from openai import OpenAI

from convoy.api.listen.options import ServeOptions
from support.chat_events import parse_chat_stream
from support.fake_service import MAX_CONTEXT, REPLY, FakeEngine, Running, events, serving

ASK = [{"role": "user", "content": "What is it?"}]


def test_the_openai_client_gets_a_whole_answer(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(model="fake", messages=[{"role": "user", "content": "hi"}])
    assert answer.choices[0].message.content == REPLY
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("<user>hi<assistant>")
    assert answer.usage.completion_tokens == len(REPLY)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + len(REPLY)


def test_the_openai_client_streams_the_same_answer(openai: OpenAI) -> None:
    stream = openai.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == REPLY
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert len({c.id for c in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(REPLY)
    assert all(c.usage is None for c in chunks[:-1])


def test_a_stream_is_data_lines_that_end_with_done(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json={"model": "fake", "messages": ASK, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")
    assert all("usage" not in event for event in events(answer.text)[:-1])
    assert "access-control-allow-origin" not in answer.headers


def test_continuous_usage_counts_on_every_chunk(http: httpx.Client) -> None:
    body = {"messages": ASK, "stream": True, "max_completion_tokens": 3, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    answer = http.post("/v1/chat/completions", json={"model": "fake", **body})
    usages = [e["usage"]["completion_tokens"] for e in events(answer.text) if isinstance(e, dict)]
    assert usages == [0, 1, 2, 3, 3, 3]


def test_the_progress_of_a_prompt_is_told_if_asked_for(server: Running, http: httpx.Client) -> None:
    body = {"messages": ASK, "stream": True, "stream_options": {"include_progress": True}}
    told = events(http.post("/v1/chat/completions", json=body).text)
    num_prompt = len(server.engine.handles[-1].request.prompt_ids)
    found = [event for event in told if isinstance(event, dict) and "prompt_progress" in event]
    assert [event["choices"] for event in found] == [[]]
    assert found[0]["prompt_progress"] == {"total": num_prompt, "cache": 0, "processed": num_prompt // 2}
    silent = events(http.post("/v1/chat/completions", json={"messages": ASK, "stream": True}).text)
    assert not any("prompt_progress" in event for event in silent)


def test_content_parts_are_one_text(server: Running, http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "What "}, {"type": "text", "text": "is it?"}]
    for content in ("What is it?", parts):
        answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})
        assert answer.status_code == 200
    first, second = (handle.request.prompt_ids for handle in server.engine.handles[-2:])
    assert first == second


def test_developer_is_a_name_for_system(server: Running, http: httpx.Client) -> None:
    messages = [{"role": "developer", "content": "be brief"}, *ASK]
    assert http.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
    assert bytes(server.engine.handles[-1].request.prompt_ids).startswith(b"<system>be brief<user>")


def test_system_messages_stay_at_the_start_and_users_take_turns(server: Running, http: httpx.Client) -> None:
    roles = ["system", "developer", "user", "user", "assistant", "system", "user"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, "abcdefg", strict=True)]
    assert http.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
    prompt = bytes(server.engine.handles[-1].request.prompt_ids).decode()
    late = "<system-reminder>\nf\n</system-reminder>"
    assert prompt == f"<system>a\n\nb<user>c\n\nd<assistant>e<user>{late}\n\ng<assistant>"


def test_users_with_names_keep_turns_of_their_own(server: Running, http: httpx.Client) -> None:
    messages = [{"role": "user", "content": name, "name": name} for name in ("ann", "bob")]
    assert http.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
    prompt = bytes(server.engine.handles[-1].request.prompt_ids).decode()
    assert prompt == "<user>ann<user>bob<assistant>"


def test_parameters_reach_the_engine(server: Running, http: httpx.Client) -> None:
    body = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1, "seed": -5}
    body |= {"presence_penalty": 0.3, "frequency_penalty": -0.2, "max_tokens": 4, "n": 2}
    extra = {"stop": "42", "ignore_eos": True, "logit_bias": {"65": -100}, "user": "u", "unheard_of": [1]}
    answer = http.post("/v1/chat/completions", json={"messages": ASK, **body, **extra})
    assert answer.status_code == 200
    request = server.engine.handles[-1].request
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.repetition_penalty, params.presence_penalty) == (1.1, 0.3)
    assert (params.frequency_penalty, params.seed, dict(params.logit_bias)) == (-0.2, -5, {65: -100})
    assert (request.max_tokens, request.num_choices, request.stop) == (4, 2, ("42",))
    assert request.ignore_eos
    assert answer.json()["choices"][1]["index"] == 1
    assert answer.json()["usage"]["completion_tokens"] == 8


def test_without_a_seed_two_requests_differ_and_the_rest_is_the_default(
    server: Running, http: httpx.Client
) -> None:
    for _ in range(2):
        assert http.post("/v1/chat/completions", json={"messages": ASK}).status_code == 200
    first, second = (handle.request for handle in server.engine.handles[-2:])
    assert first.params.seed != second.params.seed
    assert (first.params.temperature, first.params.top_p, first.params.top_k) == (1.0, 1.0, 0)
    assert first.max_tokens == 4096 - len(first.prompt_ids)


def test_length_is_the_reason_where_max_tokens_cut(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=3
    )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("The", "length")


def test_a_stop_string_is_not_shown(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hi"}], stop=["swer"]
    )
    assert answer.choices[0].finish_reason == "stop"
    assert "swer" not in (answer.choices[0].message.content or "")


def test_chat_logprobs_have_bytes_and_alternatives(openai: OpenAI) -> None:
    kwargs = {"model": "fake", "messages": ASK, "logprobs": True, "top_logprobs": 3, "max_tokens": 2}
    answer = openai.chat.completions.create(**kwargs)  # type: ignore[call-overload]
    content = answer.choices[0].logprobs.content
    assert [(c.token, c.bytes, c.logprob) for c in content] == [("T", [84], -0.084), ("h", [104], -0.104)]
    assert [t.token for t in content[0].top_logprobs] == ["T", "U", "V"]
    chunks = openai.chat.completions.create(**kwargs, stream=True)  # type: ignore[call-overload]
    streamed = [c.choices[0].logprobs.content for c in chunks if c.choices[0].logprobs]
    assert [entry for entries in streamed for entry in entries] == content


def test_no_logprobs_unless_asked(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": ASK, "logprobs": False})
    assert answer.json()["choices"][0]["logprobs"] is None


def test_half_a_character_is_bytes_beside_its_logprob() -> None:
    with serving(FakeEngine("é")) as running:
        answer = httpx.post(f"{running.url}/v1/chat/completions", json={"messages": ASK, "logprobs": True})
        choice = answer.json()["choices"][0]
        assert choice["message"]["content"] == "é"
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["bytes:\\xc3", "bytes:\\xa9"]
        assert [entry["bytes"] for entry in choice["logprobs"]["content"]] == [[0xC3], [0xA9]]


@pytest.mark.parametrize(
    "harmless",
    [
        {"tools": []},
        {"tools": None, "tool_choice": "auto"},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"n": None, "stop": None, "seed": None, "stream_options": None, "logit_bias": None},
        {"best_of": 1},
        {"max_tokens": 5, "max_completion_tokens": 5},
        {"stop": []},
    ],
)
def test_fields_that_ask_for_nothing_are_taken(http: httpx.Client, harmless: dict[str, object]) -> None:
    answer = http.post("/v1/chat/completions", json={"model": "fake", "messages": ASK, **harmless})
    assert answer.status_code == 200, answer.text


def test_an_answer_without_max_tokens_may_fill_what_the_engine_has_room_for_now() -> None:
    with serving() as running:
        for room in (MAX_CONTEXT, 100):  # a loss, and other stages with less
            running.engine.room = room
            answer = httpx.post(f"{running.url}/v1/chat/completions", json={"messages": ASK})
            assert answer.status_code == 200
            asked = running.engine.handles[-1].request
            assert (asked.max_tokens, asked.open_ended) == (room - len(asked.prompt_ids), True)
            card = httpx.get(f"{running.url}/v1/models/fake").json()
            assert card["max_model_len"] == room
        running.engine.room = 8
        answer = httpx.post(f"{running.url}/v1/chat/completions", json={"messages": ASK})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_silent_chat_is_kept_alive_by_chunks_without_text() -> None:
    engine, sign = FakeEngine(), '"delta":{},"logprobs":null,"finish_reason":null'
    engine.pause_after = 0
    with (
        serving(engine, ServeOptions(port=0, drain_s=5.0, heartbeat_s=0.05)) as running,
        httpx.stream(
            "POST", f"{running.url}/v1/chat/completions", json={"messages": ASK, "stream": True}, timeout=20
        ) as answer,
    ):
        text = ""
        for part in answer.iter_text():
            text += part
            if text.count(sign) >= 2:
                engine.go.set()
    chunks = parse_chat_stream(text)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == REPLY
    assert "still here" not in text
