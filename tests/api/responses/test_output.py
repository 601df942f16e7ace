"""Pieces become items and events, which OpenAI's own types accept in strict mode."""

from __future__ import annotations

import itertools
import json
from functools import partial
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseOutputItem, ResponseStreamEvent

from convoy.api.responses.items import read_items
from convoy.api.responses.output import OutputWriter
from convoy.api.responses.shapes import Event
from convoy.api.responses.store import item_id
from convoy.model.text.conversation import ToolCall, Turn
from convoy.model.text.pieces import CallPiece, Piece, ReasoningPiece, TextPiece
from support.strict_types import parse_strictly

SOURCES = {"disk__read": ("disk", "read"), "write": ("", "write")}
PIECES: tuple[Piece, ...] = (
    ReasoningPiece("I "),
    ReasoningPiece("think"),
    TextPiece("Let me "),
    TextPiece("look."),
    CallPiece(0, "call_a", "disk__read", ""),
    CallPiece(0, arguments='{"path":'),
    CallPiece(0, arguments='"x"}'),
    CallPiece(1, "call_b", "write", "{}"),
)


def written(
    *pieces: Piece, summarise: bool = False, encode: bool = False, cut: bool = False
) -> tuple[OutputWriter, list[Event]]:
    count = itertools.count()
    writer = OutputWriter(
        lambda: next(count),
        SOURCES,
        item_id=partial(item_id, "resp_1"),
        summarise=summarise,
        encode=encode,
    )
    events = [event for piece in pieces for event in writer.write(piece)]
    events += writer.close("incomplete" if cut else "completed")
    return writer, events


def raw(event: Event) -> Any:
    return json.loads(msgspec.json.encode(event))


def names(events: list[Event]) -> list[str]:
    return [raw(event)["type"].removeprefix("response.") for event in events]


def check_strictly(writer: OutputWriter, events: list[Event]) -> None:
    for number, event in enumerate(events):
        parsed = parse_strictly(ResponseStreamEvent, msgspec.json.encode(event))
        assert parsed.sequence_number == number
    for item in writer.items:
        parse_strictly(ResponseOutputItem, msgspec.json.encode(item))


def test_every_event_is_one_of_openais_types_in_strict_mode() -> None:
    for summarise in (False, True):
        for cut in (False, True):
            check_strictly(*written(*PIECES, summarise=summarise, encode=summarise, cut=cut))


def test_a_text_has_the_whole_sequence_of_events() -> None:
    _, events = written(TextPiece("a"), TextPiece("b"))
    assert names(events) == [
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ]
    assert [raw(event).get("text") for event in events][4] == "ab"
    assert raw(events[0])["item"]["content"] == []
    assert raw(events[6])["item"]["content"][0]["text"] == "ab"


def test_a_call_has_the_whole_sequence_of_events() -> None:
    _, events = written(*PIECES[4:7])
    assert names(events) == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    item = raw(events[-1])["item"]
    assert (item["namespace"], item["name"], item["call_id"]) == ("disk", "read", "call_a")
    assert (item["arguments"], item["status"]) == ('{"path":"x"}', "completed")
    assert raw(events[0])["item"]["arguments"] == ""


def test_a_call_without_arguments_yet_is_announced_at_once() -> None:
    _, events = written(PIECES[4])
    assert names(events)[0] == "output_item.added"


def test_a_function_outside_a_namespace_has_none() -> None:
    writer, _ = written(PIECES[7])
    assert "namespace" not in json.loads(msgspec.json.encode(writer.items[0]))


def test_a_reasoning_is_content_or_its_own_summary() -> None:
    writer, events = written(*PIECES[:2])
    item = json.loads(msgspec.json.encode(writer.items[0]))
    assert names(events)[1:4] == ["content_part.added", "reasoning_text.delta", "reasoning_text.delta"]
    assert item["content"] == [{"type": "reasoning_text", "text": "I think"}]
    assert (item["summary"], item["encrypted_content"]) == ([], None)
    writer, events = written(*PIECES[:2], summarise=True, encode=True)
    item = json.loads(msgspec.json.encode(writer.items[0]))
    assert names(events)[1:3] == ["reasoning_summary_part.added", "reasoning_summary_text.delta"]
    assert names(events)[-3:-1] == ["reasoning_summary_text.done", "reasoning_summary_part.done"]
    assert item["summary"] == [{"type": "summary_text", "text": "I think"}]
    assert "content" not in item
    assert item["encrypted_content"]


def test_items_never_interleave_and_are_numbered_in_order() -> None:
    _, events = written(*PIECES)
    indices = [raw(event)["output_index"] for event in events]
    assert indices == sorted(indices)
    assert set(indices) == {0, 1, 2, 3}


def test_an_item_that_was_cut_off_is_incomplete_and_never_done_as_a_whole() -> None:
    writer, events = written(*PIECES[:6], cut=True)
    assert [item.status for item in writer.items] == ["completed", "completed", "incomplete"]
    assert "function_call_arguments.done" not in names(events)
    assert raw(events[-1])["item"]["status"] == "incomplete"


def test_the_turn_holds_what_the_items_say() -> None:
    writer, _ = written(*PIECES)
    assert writer.turn == Turn(
        "assistant",
        "Let me look.",
        "I think",
        (ToolCall("call_a", "disk__read", '{"path":"x"}'), ToolCall("call_b", "write", "{}")),
    )


def test_items_that_a_client_sends_back_are_the_turn_again() -> None:
    for summarise in (False, True):
        writer, _ = written(*PIECES, summarise=summarise)
        items = json.loads(msgspec.json.encode(writer.items))
        assert read_items(items, max_items=100).turns == (writer.turn,)


def test_a_reasoning_survives_a_client_that_keeps_its_encrypted_content_alone() -> None:
    writer, _ = written(*PIECES, encode=True)
    items = json.loads(msgspec.json.encode(writer.items))
    del items[0]["content"]
    assert read_items(items, max_items=100).turns == (writer.turn,)


TEXTS = st.text(st.characters(codec="utf-8"), max_size=5)
ANY_PIECE = st.one_of(TEXTS.map(TextPiece), TEXTS.map(ReasoningPiece))


@given(st.lists(ANY_PIECE, max_size=12), st.booleans())
def test_the_deltas_of_any_pieces_add_up_to_the_items(pieces: list[Piece], summarise: bool) -> None:
    writer, events = written(*pieces, summarise=summarise)
    check_strictly(writer, events)
    texts = [""] * len(writer.items)
    for event in events:
        texts[raw(event)["output_index"]] += raw(event).get("delta", "")
    shown = json.loads(msgspec.json.encode(writer.items))
    assert texts == [(item.get("content") or item["summary"])[0]["text"] for item in shown]
