"""The events and bodies of /v1/messages, made of pieces as any model's reply is."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.api.anthropic.answer import MessageAnswer
from convoy.api.chat.parsed import ParsedRequest
from convoy.api.chat.reply import Ended, ReplyReader
from convoy.api.service import ServedModel
from convoy.engine.outputs import FinishOutput, Output, TokenOutput
from convoy.engine.requests.request import GenerationRequest
from convoy.errors import StageLost
from convoy.model.sampling.params import SamplingParams
from convoy.model.text.pieces import CallPiece, Piece, ReasoningPiece, TextPiece
from support.anthropic_events import blocks_of, parse_event, parse_message
from support.fake_service import ByteTokenizer, FakeEngine

PIECES: list[Piece] = [
    ReasoningPiece("It is "),
    ReasoningPiece("late."),
    TextPiece("I look"),
    TextPiece(" it up."),
    CallPiece(0, "call_1", "clock", ""),
    CallPiece(0, arguments='{"zone"'),
    CallPiece(0, arguments=': "UTC"}'),
    CallPiece(1, "call_2", "moon", "{}"),
]


def asked(*, open_ended: bool = False) -> ParsedRequest:
    request = GenerationRequest((1, 2, 3, 4), SamplingParams(), max_tokens=50, open_ended=open_ended)
    return ParsedRequest(
        ServedModel("fake", FakeEngine(), ByteTokenizer()),
        (request,),
        1,
        stream=True,
        include_usage=False,
        continuous_usage=False,
    )


class ScriptedReader(ReplyReader):
    """Return one piece of a script for each token, and its end for the finish."""

    def __init__(self, request: ParsedRequest, pieces: list[Piece], ended: Ended) -> None:
        super().__init__(request)
        self.pieces, self.ended = iter(pieces), ended

    def read(self, output: Output) -> list[tuple[int, Piece | Ended]]:
        return [(0, self.ended if isinstance(output, FinishOutput) else next(self.pieces))]


def answer_of(pieces: list[Piece], ended: Ended, *, open_ended: bool = False) -> MessageAnswer:
    return MessageAnswer(
        asked(open_ended=open_ended), secret=b"s", reader=lambda one: ScriptedReader(one, pieces, ended)
    )


def outputs(pieces: list[Piece], cached: int = 0) -> list[Output]:
    return [*(TokenOutput(0, 7, "") for _ in pieces), FinishOutput(0, "stop", cached_tokens=cached)]


def streamed(pieces: list[Piece], ended: Ended, cached: int = 0) -> list[dict[str, Any]]:
    answer = answer_of(pieces, ended)
    events = [*answer.opening()]
    for output in outputs(pieces, cached):
        events += answer.events(0, output)
    events += answer.closing()
    return [
        parse_event(str(event.__struct_config__.tag), msgspec.json.encode(event).decode()) for event in events
    ]


def whole(pieces: list[Piece], ended: Ended, *, open_ended: bool = False) -> dict[str, Any]:
    answer = answer_of(pieces, ended, open_ended=open_ended)
    for output in outputs(pieces):
        answer.add(0, output)
    text = msgspec.json.encode(answer.whole()).decode()
    parse_message(text)
    found: dict[str, Any] = json.loads(text)
    return found


def test_reasoning_text_and_calls_are_blocks_of_their_own_in_order() -> None:
    events = streamed(PIECES, Ended("tool_calls"))
    thinking, text, clock, moon = blocks_of(events)
    assert thinking["thinking"] == "It is late."
    assert thinking["signature"]
    assert text["text"] == "I look it up."
    assert (clock["id"], clock["name"], clock["input"]) == ("call_1", "clock", {})
    assert json.loads(clock["json"]) == {"zone": "UTC"}
    assert (moon["id"], moon["name"], moon["json"]) == ("call_2", "moon", "{}")
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


@pytest.mark.parametrize("number", ["1e999", "-0.0", "1" + "0" * 5000])
def test_a_number_of_any_size_stays_in_a_calls_input(number: str) -> None:
    answer = answer_of([CallPiece(0, "call_1", "clock", f'{{"size": {number}}}')], Ended("tool_calls"))
    for output in outputs([TextPiece("")]):
        answer.add(0, output)
    assert f'"input":{{"size": {number}}}' in msgspec.json.encode(answer.whole()).decode()


@pytest.mark.parametrize("text", ['{"size": NaN}', '{"size": }', "[1]"])
def test_arguments_that_are_no_object_become_text(text: str) -> None:
    (block,) = whole([CallPiece(0, "call_1", "clock", text)], Ended("tool_calls"))["content"]
    assert block == {"type": "text", "text": text, "citations": None}


def test_a_whole_answer_has_the_blocks_of_the_stream() -> None:
    thinking, text, clock, moon = whole(PIECES, Ended("tool_calls"))["content"]
    streamed_thinking, *_ = blocks_of(streamed(PIECES, Ended("tool_calls")))
    assert thinking["signature"] == streamed_thinking["signature"]
    assert thinking["thinking"] == "It is late."
    assert text["text"] == "I look it up."
    assert clock == {"type": "tool_use", "id": "call_1", "name": "clock", "input": {"zone": "UTC"}}
    assert moon["input"] == {}


def test_a_stream_begins_with_its_message_and_a_ping() -> None:
    start, ping = streamed([], Ended("stop"))[:2]
    assert start["message"]["content"] == []
    assert start["message"]["stop_reason"] is None
    assert start["message"]["usage"]["input_tokens"] == 4
    assert ping == {"type": "ping"}


def test_usage_tells_cached_and_other_tokens_apart() -> None:
    usage = streamed(PIECES, Ended("stop"), cached=3)[-2]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (1, 3)
    assert usage["output_tokens"] == len(PIECES)


@pytest.mark.parametrize(
    ("ended", "open_ended", "reason", "sequence"),
    [
        (Ended("stop"), False, "end_turn", None),
        (Ended("stop", "END"), False, "stop_sequence", "END"),
        (Ended("length"), False, "max_tokens", None),
        (Ended("length"), True, "model_context_window_exceeded", None),
        (Ended("tool_calls"), False, "tool_use", None),
    ],
)
def test_each_end_has_its_stop_reason(
    ended: Ended, open_ended: bool, reason: str, sequence: str | None
) -> None:
    found = whole([TextPiece("a")], ended, open_ended=open_ended)
    assert (found["stop_reason"], found["stop_sequence"]) == (reason, sequence)


def test_a_call_that_the_length_cut_off_has_no_input() -> None:
    (call,) = whole([CallPiece(0, "call_1", "clock", '{"zone": "U')], Ended("length"))["content"]
    assert call["input"] == {}


@pytest.mark.parametrize("arguments", ['{"zone": "U', "[1]", "no json"])
def test_a_call_that_was_written_wrongly_is_text_in_a_whole_answer(arguments: str) -> None:
    broken, sound = CallPiece(0, "call_1", "clock", arguments), CallPiece(1, "call_2", "moon", "{}")
    found = whole([broken, sound], Ended("tool_calls"))
    assert (found["content"][0]["type"], found["content"][0]["text"]) == ("text", arguments)
    assert (found["content"][1]["id"], found["stop_reason"]) == ("call_2", "tool_use")
    assert whole([sound, broken], Ended("tool_calls"))["content"][1]["text"] == arguments
    assert whole([broken], Ended("tool_calls"))["stop_reason"] == "end_turn"
    assert whole([broken, sound], Ended("length"))["content"][0]["text"] == arguments


def test_a_signature_depends_on_the_reasoning_and_the_secret() -> None:
    def signature(text: str, secret: bytes) -> str:
        answer = MessageAnswer(
            asked(),
            secret=secret,
            reader=lambda one: ScriptedReader(one, [ReasoningPiece(text)], Ended("stop")),
        )
        for output in outputs([ReasoningPiece(text)]):
            answer.add(0, output)
        found: str = json.loads(msgspec.json.encode(answer.whole()))["content"][0]["signature"]
        return found

    assert signature("a", b"1") == signature("a", b"1")
    assert len({signature("a", b"1"), signature("b", b"1"), signature("a", b"2")}) == 3


def test_a_broken_stream_ends_with_an_error_and_no_stop() -> None:
    answer = answer_of(PIECES, Ended("stop"))
    answer.events(0, TokenOutput(0, 7, ""))
    (event,) = answer.failure(StageLost("beta is gone"))
    assert json.loads(msgspec.json.encode(event)) == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "a stage of the model was lost"},
    }


texts = st.text(max_size=5)
turns = st.lists(
    st.one_of(st.builds(TextPiece, texts), st.builds(ReasoningPiece, texts), st.lists(texts, max_size=3)),
    max_size=8,
)


def is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except msgspec.DecodeError:
        return False


@given(turns)
def test_any_sequence_of_pieces_makes_blocks_that_never_interleave(
    script: list[TextPiece | ReasoningPiece | list[str]],
) -> None:
    numbers = itertools.count()
    pieces: list[Piece] = []
    for one in script:
        if isinstance(one, list):
            number = next(numbers)
            pieces.append(CallPiece(number, f"call_{number}", "f"))
            pieces += [CallPiece(number, arguments=text) for text in one]
        else:
            pieces.append(one)
    blocks = blocks_of(streamed(pieces, Ended("stop")))
    assert "".join(block.get("text", "") for block in blocks) == "".join(
        piece.text for piece in pieces if isinstance(piece, TextPiece)
    )
    assert "".join(block["json"] for block in blocks) == "".join(
        piece.arguments for piece in pieces if isinstance(piece, CallPiece)
    )
    assert [block["type"] for block in whole(pieces, Ended("stop"))["content"]] == [
        "text" if block["type"] == "tool_use" and not is_object(block["json"] or "{}") else block["type"]
        for block in blocks
    ]
