"""/v1/messages with the real client and by hand, over a real socket."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from convoy.api.keys.keys import KeyRing
from convoy.api.listen.options import ServeOptions
from convoy.errors import Draining, QueueFull, RequestError, StageLost
from support.anthropic_events import blocks_of, parse_message, parse_stream
from support.fake_service import EOS, REPLY, FakeEngine, serving

if TYPE_CHECKING:
    from anthropic import Anthropic

ASK: dict[str, Any] = {"max_tokens": 100, "messages": [{"role": "user", "content": "What is it?"}]}
PROMPT = len("<user>What is it?<assistant>")


def post(url: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/messages?beta=true", json={**ASK, **fields}, timeout=60.0)


def test_the_anthropic_client_gets_a_whole_answer(anthropic: Anthropic) -> None:
    answer = anthropic.messages.create(model="fake", max_tokens=100, messages=ASK["messages"])
    (block,) = answer.content
    assert block.type == "text"
    assert block.text == REPLY
    assert answer.stop_reason == "end_turn"
    assert answer.id.startswith("msg_")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (PROMPT, len(REPLY))


def test_the_anthropic_client_streams_the_same_answer(anthropic: Anthropic) -> None:
    with anthropic.messages.stream(model="fake", max_tokens=100, messages=ASK["messages"]) as stream:
        assert "".join(stream.text_stream) == REPLY
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn"
    assert (final.usage.input_tokens, final.usage.output_tokens) == (PROMPT, len(REPLY))


def test_every_event_and_body_has_the_types_of_the_anthropic_package(http: httpx.Client) -> None:
    stream = http.post("/v1/messages", json={**ASK, "stream": True})
    assert stream.headers["content-type"].startswith("text/event-stream")
    (block,) = blocks_of(parse_stream(stream.text))
    message = parse_message(http.post("/v1/messages", json=ASK).text)
    assert message.content[0].type == "text"
    assert message.content[0].text == block["text"] == REPLY


def test_an_answer_of_full_length_ends_with_max_tokens(http: httpx.Client) -> None:
    answer = http.post("/v1/messages", json={**ASK, "max_tokens": 3}).json()
    assert answer["content"][0]["text"] == REPLY[:3]
    assert answer["stop_reason"] == "max_tokens"


def test_more_tokens_than_the_room_are_cut_to_the_room() -> None:
    with serving(FakeEngine("a" * 100), max_context=PROMPT + 10) as running:
        answer = post(running.url, max_tokens=32_000).json()
    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert answer["usage"]["output_tokens"] == 10


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("room", "text"),
    [
        (PROMPT - 1, f"prompt is too long: {PROMPT} tokens > {PROMPT - 1} maximum"),
        (PROMPT, f"input length and `max_tokens` exceed context limit: {PROMPT} + 100 > {PROMPT}"),
    ],
)
def test_a_context_error_comes_before_the_stream_with_its_numbers(room: int, text: str, stream: bool) -> None:
    with serving(max_context=room) as running:
        answer = post(running.url, stream=stream)
        assert running.engine.handles == []
    assert answer.status_code == 400
    assert answer.json() == {"type": "error", "error": {"type": "invalid_request_error", "message": text}}


def test_a_context_error_of_the_engine_has_the_words_that_clients_look_for() -> None:
    engine = FakeEngine()
    engine.refuse = RequestError("it does not fit", code="context_length_exceeded")
    with serving(engine) as running:
        answer = post(running.url)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "prompt is too long: it does not fit"


def test_a_repeated_context_error_still_says_that_the_prompt_is_too_long() -> None:
    with serving(max_context=5) as running:
        answers = [post(running.url) for _ in range(6)]
    assert [answer.status_code for answer in answers] == [400] * 5 + [429]
    assert answers[5].json()["error"]["type"] == "rate_limit_error"
    assert answers[5].json()["error"]["message"].startswith("prompt is too long: ")


def test_count_tokens_counts_the_prompt_also_beyond_the_context(anthropic: Anthropic) -> None:
    counted = anthropic.messages.count_tokens(model="fake", messages=ASK["messages"], system="Be brief.")
    assert counted.input_tokens == len("<system>Be brief.") + PROMPT
    long = [{"role": "user", "content": "a" * 9000}]
    counted = anthropic.messages.count_tokens(model="fake", messages=long)  # type: ignore[arg-type]
    assert counted.input_tokens == len("<user><assistant>") + 9000


def test_a_silent_stream_sends_pings_from_its_start() -> None:
    engine = FakeEngine()
    engine.pause_after = 0
    with (
        serving(engine, ServeOptions(port=0, heartbeat_s=0.05)) as running,
        httpx.stream(
            "POST", f"{running.url}/v1/messages", json={**ASK, "stream": True}, timeout=20
        ) as answer,
    ):
        text, parts = "", answer.iter_text()
        while text.count("event: ping") < 4:
            text += next(parts)
        assert "content_block_start" not in text
        engine.go.set()
        text += "".join(parts)
    (block,) = blocks_of(parse_stream(text))
    assert block["text"] == REPLY


def test_a_lost_stage_ends_the_stream_with_an_error_event() -> None:
    engine = FakeEngine()
    engine.pause_after = engine.fail_after = 3
    engine.error = StageLost("beta is gone")
    with (
        serving(engine) as running,
        httpx.stream(
            "POST", f"{running.url}/v1/messages", json={**ASK, "stream": True}, timeout=20
        ) as answer,
    ):
        parts = answer.iter_text()
        text = next(parts)
        engine.go.set()
        text += "".join(parts)
    events = parse_stream(text)
    assert events[-1]["error"] == {"type": "overloaded_error", "message": "a stage of the model was lost"}
    assert "message_stop" not in [event["type"] for event in events]


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [(QueueFull("full"), 429, "rate_limit_error"), (Draining("bye"), 503, "overloaded_error")],
)
def test_an_error_before_the_stream_has_its_status_and_type(
    error: QueueFull | Draining, status: int, kind: str
) -> None:
    engine = FakeEngine()
    engine.refuse = error
    with serving(engine) as running:
        answer = post(running.url, stream=True)
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)


def test_a_key_comes_as_x_api_key_or_as_a_bearer_token() -> None:
    key = "the-one-key-of-many"
    with serving(options=ServeOptions(port=0, keys=KeyRing.of(key))) as running:
        for headers in ({"x-api-key": key}, {"Authorization": f"Bearer {key}"}):
            answer = httpx.post(f"{running.url}/v1/messages", json=ASK, headers=headers, timeout=60.0)
            assert answer.status_code == 200
        refused = post(running.url)
        head = httpx.head(f"{running.url}/")
    assert refused.status_code == 401
    assert refused.json()["error"]["type"] == "authentication_error"
    assert head.status_code == 200


def test_models_have_anthropics_form_for_its_clients(anthropic: Anthropic, http: httpx.Client) -> None:
    from anthropic.types import ModelInfo

    (model,) = anthropic.models.list().data
    assert (model.id, model.type) == ("fake", "model")
    raw = http.get("/v1/models/fake", headers={"anthropic-version": "2023-06-01"})
    assert ModelInfo.model_validate_json(raw.text, strict=True).id == "fake"
    assert http.get("/v1/models").json()["object"] == "list"


def test_errors_have_anthropics_form_for_its_clients(anthropic: Anthropic, http: httpx.Client) -> None:
    from anthropic import BadRequestError, NotFoundError

    with pytest.raises(NotFoundError) as missing:
        anthropic.models.retrieve("other")
    assert missing.value.response.json()["error"]["type"] == "not_found_error"
    wrong: Any = [{"role": "x", "content": "a"}]
    with pytest.raises(BadRequestError, match=r"messages\.0\.role"):
        anthropic.messages.create(model="fake", max_tokens=1, messages=wrong)
    assert http.get("/v1/messages").json()["error"]["type"] == "invalid_request_error"
    assert "type" not in http.get("/v1/other").json()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ],
)
def test_a_wrong_field_is_named(http: httpx.Client, change: dict[str, Any], word: str) -> None:
    answer = http.post("/v1/messages", json={**ASK, **change})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert word in answer.json()["error"]["message"]


def test_unknown_fields_and_betas_are_ignored(http: httpx.Client) -> None:
    more = {
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "metadata": {"user_id": "me"},
        "service_tier": "auto",
        "thinking": {"type": "adaptive", "display": "summarized"},
        "output_config": {"effort": "unheard-of"},
    }
    headers = {"anthropic-beta": "a-2026-01-01,b", "anthropic-version": "2023-06-01"}
    assert http.post("/v1/messages", json={**ASK, **more}, headers=headers).status_code == 200


def test_dropped_blocks_are_counted_by_type(http: httpx.Client) -> None:
    with serving() as running:
        blocks = [{"type": kind} for kind in ("redacted_thinking", "web_search_tool_result", "made-up")]
        ask = [{"role": "user", "content": "a"}, {"role": "assistant", "content": blocks}]
        answer = post(running.url, messages=[*ask, {"role": "user", "content": "b"}])
        metrics = httpx.get(f"{running.url}/metrics").text
    assert answer.status_code == 200
    for kind in ("redacted_thinking", "tool_result", "other"):
        assert f'convoy_http_dropped_blocks_total{{api="messages",type="{kind}"}} 1.0' in metrics
    assert "made-up" not in metrics
    assert 'convoy_http_requests_total{path="/v1/messages",status="200"} 1.0' in metrics


CLOCK: dict[str, Any] = {
    "name": "clock",
    "input_schema": {"type": "object", "properties": {"zone": {"type": "string"}}},
}
CALLING = (
    "<think>It asks for the time.</think>I look."
    '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'
)


def test_the_anthropic_client_runs_a_tool_and_reads_the_answer() -> None:
    from anthropic import Anthropic

    engine = FakeEngine(CALLING)
    asked: Any = list(ASK["messages"])
    with (
        serving(engine) as running,
        Anthropic(base_url=running.url, api_key="unused", max_retries=0) as client,
    ):
        given: Any = {"model": "fake", "max_tokens": 500, "tools": [CLOCK]}
        with client.messages.stream(messages=asked, **given) as stream:
            first = stream.get_final_message()
        thinking, text, call = first.content
        asked += [
            {"role": "assistant", "content": [block.to_dict() for block in first.content]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "noon"}]},  # type: ignore[union-attr]
        ]
        engine.reply = "It is noon."
        second = client.messages.create(messages=asked, **given)
        prompt = bytes(engine.handles[-1].request.prompt_ids).decode()
    assert (thinking.type, text.type, call.type) == ("thinking", "text", "tool_use")
    assert first.stop_reason == "tool_use"
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("clock", {"zone": "UTC"})
    assert [block.to_dict()["text"] for block in second.content] == ["It is noon."]
    assert "<think>It asks for the time.</think>I look." in prompt
    assert f"<tool>noon<result of {call.id} clock>" in prompt


def test_calls_and_reasoning_stream_as_the_types_of_the_anthropic_package() -> None:
    with serving(FakeEngine(CALLING)) as running:
        streamed = blocks_of(parse_stream(post(running.url, stream=True, max_tokens=500, tools=[CLOCK]).text))
        message = parse_message(post(running.url, max_tokens=500, tools=[CLOCK]).text)
    assert [block.type for block in message.content] == [block["type"] for block in streamed]
    thinking, text, call = streamed
    assert (thinking["thinking"], text["text"]) == ("It asks for the time.", "I look.")
    assert thinking["signature"] == message.content[0].to_dict()["signature"]
    assert json.loads(call["json"]) == message.content[2].to_dict()["input"] == {"zone": "UTC"}


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_sequence_that_matched_is_told(http: httpx.Client, stream: bool) -> None:
    body = {**ASK, "stop_sequences": ["nothing", "42"], "stream": stream}
    answer = http.post("/v1/messages", json=body)
    stopped = parse_stream(answer.text)[-2]["delta"] if stream else answer.json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "42")


def test_an_assistants_last_message_is_continued_and_variables_reach_the_template() -> None:
    with serving() as running:
        answer = post(
            running.url,
            messages=[*ASK["messages"], {"role": "assistant", "content": "The answer"}],
            thinking={"type": "disabled"},
            output_config={"effort": "low"},
        )
        prompt = bytes(running.engine.handles[0].request.prompt_ids).decode()
    assert answer.status_code == 200
    assert prompt.endswith("<user>What is it?<assistant>The answer")
    assert '{"enable_thinking": false, "thinking": false, "reasoning_effort": "low"}' in prompt


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        (
            {"tools": [CLOCK], "tool_choice": {"type": "any"}},
            '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>',
            "It is noon.",
        ),
        (
            {"tools": [CLOCK], "tool_choice": {"type": "tool", "name": "clock"}},
            '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>',
            '<tool_call>\n{"name": "moon", "arguments": {}}\n</tool_call>',
        ),
        ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, '{"a": 1}', "{}"),
    ],
)
def test_a_demanded_call_or_form_is_the_engines_grammar(fields: dict[str, Any], good: str, bad: str) -> None:
    with serving() as running:
        assert post(running.url, **fields).status_code == 200
        grammar = running.engine.handles[0].request.grammar
    assert grammar is not None
    for text, whole in ((good, True), (bad, False)):
        tokens = [*text.encode(), EOS]
        assert (grammar.matcher().allowed_start(tokens) == len(tokens)) is whole


def test_a_schema_that_cannot_be_enforced_is_refused_by_its_field(http: httpx.Client) -> None:
    form = {"type": "json_schema", "schema": {"type": "array", "uniqueItems": True}}
    answer = http.post("/v1/messages", json={**ASK, "output_config": {"format": form}})
    assert answer.status_code == 400
    assert "uniqueItems" in answer.json()["error"]["message"]
