"""Outputs of the engine become a response, with calls, reasoning and their tokens."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from openai.types.responses import ResponseStreamEvent

from convoy.api.listen.options import ServeOptions
from convoy.api.refusals import NoBalance, RateLimited
from convoy.api.responses.answer import ResponsesAnswer
from convoy.api.responses.bodies import decode_responses
from convoy.api.responses.problem import error_of
from convoy.api.responses.store import ResponseStore
from convoy.api.responses.translate import ResponsesRequest, read_response
from convoy.api.service import ServedModel, Service
from convoy.api.telemetry.dropped import DroppedHistory
from convoy.engine.outputs import FinishOutput, TokenOutput
from convoy.errors import ConvoyError, QueueFull, RequestError, StageLost
from convoy.model.text.conversation import ToolCall, Turn
from support.fake_service import ByteTokenizer, FakeEngine
from support.strict_types import parse_strictly

OWNER = b"ann"
THOUGHT, SAID = "<think>\nI think\n</think>\n\n", "Let me look."
CALL = '<tool_call>\n{"name": "disk__read", "arguments": {"path": "x"}}\n</tool_call>'
FUNCTION = {"type": "function", "name": "read", "parameters": {"type": "object"}}
TOOLS = [{"type": "namespace", "name": "disk", "description": "", "tools": [FUNCTION]}]


def asked(**given: Any) -> ResponsesRequest:
    service = Service((ServedModel("fake", FakeEngine(), ByteTokenizer()),), lambda: (True, ""), dict)
    data = msgspec.json.encode({"input": "hi", "tools": TOOLS, **given})
    body, options = decode_responses(data), ServeOptions()
    return read_response(body, service, options, OWNER, store=ResponseStore(), dropped=DroppedHistory())


def fed(answer: ResponsesAnswer, reply: str, reason: Any = "stop") -> list[dict[str, Any]]:
    """Return the events of a whole stream, each checked by OpenAI's type in strict mode."""
    events = [*answer.opening()]
    for token in reply.encode():
        events += answer.events(0, TokenOutput(0, token, chr(token)))
    events += answer.events(0, FinishOutput(0, reason, cached_tokens=5))
    events += answer.closing()
    for event in events:
        parse_strictly(ResponseStreamEvent, msgspec.json.encode(event))
    return [json.loads(msgspec.json.encode(event)) for event in events]


def test_a_reply_with_reasoning_text_and_a_call() -> None:
    request = asked()
    last = fed(ResponsesAnswer(request), THOUGHT + SAID + CALL)[-1]
    response = last["response"]
    assert (last["type"], response["status"]) == ("response.completed", "completed")
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
    assert response["output"][0]["content"][0]["text"] == "I think"
    assert response["output"][1]["content"][0]["text"] == "Let me look."
    assert response["output"][2]["arguments"] == '{"path": "x"}'
    assert response["usage"]["input_tokens"] == request.num_prompt_tokens
    assert response["usage"]["input_tokens_details"] == {"cached_tokens": 5, "cache_write_tokens": 0}
    assert response["usage"]["output_tokens"] == len(THOUGHT + SAID + CALL)
    assert response["usage"]["total_tokens"] == request.num_prompt_tokens + len(THOUGHT + SAID + CALL)


def test_the_tokens_of_a_reasoning_are_counted_with_the_mark_that_ends_it() -> None:
    usage = fed(ResponsesAnswer(asked()), THOUGHT + SAID)[-1]["response"]["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": len(THOUGHT) - len("<think>\n")}
    usage = fed(ResponsesAnswer(asked()), SAID)[-1]["response"]["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}


def test_a_call_of_a_namespace_carries_it() -> None:
    call = fed(ResponsesAnswer(asked()), CALL)[-1]["response"]["output"][0]
    assert (call["namespace"], call["name"]) == ("disk", "read")


def test_a_reasoning_is_summarised_and_encoded_if_asked_for() -> None:
    body = {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}
    item = fed(ResponsesAnswer(asked(**body)), THOUGHT + SAID)[-1]["response"]["output"][0]
    assert item["summary"] == [{"type": "summary_text", "text": "I think"}]
    assert item["encrypted_content"]


def test_a_call_that_reached_the_most_tokens_is_incomplete() -> None:
    events = fed(ResponsesAnswer(asked()), SAID + CALL[:-20], "length")
    assert events[-1]["type"] == "response.incomplete"
    assert [item["status"] for item in events[-1]["response"]["output"]] == ["completed", "incomplete"]
    assert "response.function_call_arguments.done" not in [event["type"] for event in events]


def test_a_stored_turn_has_its_reasoning_and_its_calls() -> None:
    store = ResponseStore()
    last = fed(ResponsesAnswer(asked(), store), THOUGHT + SAID + CALL)[-1]["response"]
    call = ToolCall(last["output"][2]["call_id"], "disk__read", '{"path": "x"}')
    assert store.turns(OWNER, last["id"]) == (
        Turn("user", "hi"),
        Turn("assistant", "Let me look.", "I think", (call,)),
    )
    assert json.loads(store.body(OWNER, last["id"])) == last


def test_a_break_keeps_the_items_that_were_complete() -> None:
    answer = ResponsesAnswer(asked())
    answer.opening()
    for token in (THOUGHT + SAID).encode():
        answer.events(0, TokenOutput(0, token, chr(token)))
    (failed,) = answer.failure(StageLost("lost"))
    raw = json.loads(msgspec.json.encode(failed))
    assert (raw["type"], raw["response"]["status"]) == ("response.failed", "failed")
    assert [item["type"] for item in raw["response"]["output"]] == ["reasoning"]


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (
            RequestError("x", code="context_length_exceeded"),
            "context_length_exceeded",
            "context_length_exceeded",
        ),
        (NoBalance("x"), "insufficient_quota", "insufficient_quota"),
        (RateLimited("x", retry_after_s=7.0), "rate_limit_exceeded", "rate_limit_exceeded"),
        (QueueFull("x"), "rate_limit_exceeded", "queue_full"),
        (StageLost("x"), "server_error", "stage_lost"),
    ],
)
def test_an_error_has_one_of_the_codes_that_clients_know(error: ConvoyError, code: str, kind: str) -> None:
    made = error_of(error)
    assert (made.code, made.type) == (code, kind)


def test_a_rate_limit_says_when_to_try_again() -> None:
    assert "try again in 7s" in error_of(RateLimited("x", retry_after_s=7.0)).message


def test_a_stored_response_counts_for_the_key_also_under_a_cache_salt() -> None:
    plain, salted = asked(), asked(cache_salt="mine")
    assert plain.owner == plain.key == salted.key == OWNER
    assert salted.owner != OWNER
