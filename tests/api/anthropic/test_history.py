"""Messages become turns: folded, dropped or refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from convoy.api.anthropic.bodies import InputMessage
from convoy.api.anthropic.history import MessageHistory, read_history
from convoy.errors import RequestError
from convoy.model.text.conversation import ToolCall, Turn

CALL = {"type": "tool_use", "id": "call_1", "name": "clock", "input": {"zone": "UTC"}}
RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": "noon"}


def read(*messages: tuple[str, Any], system: Any = None, max_parts: int = 100) -> MessageHistory:
    given = msgspec.convert(
        [{"role": role, "content": content} for role, content in messages], list[InputMessage]
    )
    return read_history(system, given, max_parts=max_parts)


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content, "cache_control": {"type": "ephemeral"}}


def test_text_and_blocks_of_text_are_the_same_turn() -> None:
    assert read(("user", "hi")).turns == read(("user", [text("hi")])).turns == [Turn("user", "hi")]


def test_a_billing_header_is_dropped_from_the_system_blocks() -> None:
    system = [text("x-anthropic-billing-header: cc_version=2.1; cch=1;"), text("Be brief."), text("Be kind.")]
    assert read(("user", "hi"), system=system).turns[0] == Turn("system", "Be brief.\nBe kind.")
    assert read(("user", "hi"), system=system[:1]).turns == [Turn("user", "hi")]


def test_a_system_message_joins_the_system_prompt_or_the_users_text() -> None:
    turns = read(("system", "Be kind."), ("user", "hi"), ("system", "It is late."), system="Be brief.").turns
    assert turns == [
        Turn("system", "Be brief.\n\nBe kind."),
        Turn("user", "hi\n\n<system-reminder>\nIt is late.\n</system-reminder>"),
    ]
    assert read(("system", "Be kind."), ("user", "hi")).turns[0] == Turn("system", "Be kind.")


def test_neighbours_of_one_role_are_one_turn() -> None:
    turns = read(("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d"), ("user", "e")).turns
    assert turns == [Turn("user", "a\n\nb"), Turn("assistant", "cd"), Turn("user", "e")]


def test_a_call_and_its_result_are_replayed() -> None:
    thinking = {"type": "thinking", "thinking": "Look it up.", "signature": "of another server"}
    turns = read(
        ("user", "When?"), ("assistant", [thinking, text("Well,"), CALL]), ("user", [RESULT, text("So?")])
    ).turns
    assert turns[1:] == [
        Turn("assistant", "Well,", "Look it up.", (ToolCall("call_1", "clock", '{"zone":"UTC"}'),)),
        Turn("tool", "noon", call_id="call_1", name="clock"),
        Turn("user", "So?"),
    ]


def test_a_turn_of_reasoning_alone_is_dropped_unless_it_is_continued() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    for role in ("user", "system"):
        history = read(("user", "a"), ("assistant", [thinking]), (role, "b"), ("user", "c"))
        assert [turn.role for turn in history.turns] == ["user"]
        assert history.dropped == ["thinking"]
    history = read(("user", "a"), ("assistant", [thinking]), ("assistant", "so"), ("user", "b"))
    assert history.turns[1] == Turn("assistant", "so", "hm")
    history = read(("user", "a"), ("assistant", [thinking]))
    assert (history.turns[-1], history.dropped) == (Turn("assistant", "", "hm"), [])


def test_unknown_blocks_are_dropped_and_reported() -> None:
    history = read(
        ("user", [text("hi"), {"type": "search_result", "source": "x"}]),
        ("assistant", [{"type": "redacted_thinking", "data": "x"}, text("ho"), {"type": "compaction"}]),
        ("user", [{"type": "web_search_tool_result", "content": []}, text("on")]),
    )
    assert history.turns == [Turn("user", "hi"), Turn("assistant", "ho"), Turn("user", "on")]
    assert history.dropped == ["search_result", "redacted_thinking", "compaction", "web_search_tool_result"]


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([], "messages"),
        ([("critic", "hi")], "messages.0.role"),
        ([("user", [{"type": "text"}])], "messages.0.content.0.text"),
        ([("user", [{"text": "hi"}])], "messages.0.content.0.type"),
        ([("user", [{"type": "image", "source": {}}])], "messages.0.content.0.type"),
        ([("user", [{"type": "document", "source": {}}])], "messages.0.content.0.type"),
        ([("user", [RESULT])], "messages.0.content.0.tool_use_id"),
        ([("assistant", [CALL]), ("user", [{"type": "tool_result"}])], "messages.1.content.0.tool_use_id"),
        (
            [("assistant", [CALL]), ("user", [{**RESULT, "content": [{"type": "image"}]}])],
            "messages.1.content.0.content.0.type",
        ),
        ([("assistant", [CALL]), ("user", [{**RESULT, "content": 7}])], "messages.1.content.0.content"),
        ([("assistant", [{**CALL, "input": "x"}])], "messages.0.content.0.input"),
        ([("assistant", [{**CALL, "id": ""}])], "messages.0.content.0.id"),
        ([("user", "hi"), ("assistant", [CALL])], "messages"),
        ([("user", "")], "messages"),
        ([("user", [text("a")] * 101)], "messages"),
        ([("user", "a")] * 101, "messages"),
    ],
)
def test_a_wrong_message_is_refused_by_its_place(messages: list[tuple[str, Any]], where: str) -> None:
    with pytest.raises(RequestError) as refused:
        read(*messages)
    assert refused.value.param == where
    assert where in refused.value.message


def test_an_input_that_is_too_deep_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(70):
        deep = {"a": deep}
    with pytest.raises(RequestError, match="levels deep"):
        read(("assistant", [{**CALL, "input": deep}]), ("user", [RESULT]))
