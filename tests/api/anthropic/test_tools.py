"""Tools of a Messages request, and the choice among them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from convoy.api.anthropic.bodies import MessageTool, MessageToolChoice
from convoy.api.anthropic.tools import read_tools
from convoy.errors import RequestError
from convoy.model.text.conversation import Tool, ToolChoice

SCHEMA = {"type": "object", "properties": {"zone": {"type": "string"}}}
CLOCK = {"name": "clock", "description": "Tell the time.", "input_schema": SCHEMA}
SEARCH = {"type": "web_search_20260209", "name": "web_search", "max_uses": 3}


def read(
    tools: list[Any] | None, choice: dict[str, Any] | None = None
) -> tuple[tuple[Tool, ...], ToolChoice]:
    return read_tools(
        msgspec.convert(tools, list[MessageTool] | None), msgspec.convert(choice, MessageToolChoice | None)
    )


def test_the_clients_own_tools_are_offered_and_others_left_out() -> None:
    tools, choice = read([SEARCH, CLOCK, {**CLOCK, "type": "custom", "name": "moon", "strict": True}])
    assert tools == (
        Tool("clock", "Tell the time.", SCHEMA),
        Tool("moon", "Tell the time.", SCHEMA, strict=True),
    )
    assert choice == ToolChoice()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "auto"}, ToolChoice()),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(parallel=False)),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice("required", parallel=False)),
        ({"type": "tool", "name": "clock"}, ToolChoice("required", "clock", parallel=False)),
        ({"type": "none"}, ToolChoice("none")),
    ],
)
def test_each_choice_is_understood(given: dict[str, Any], expected: ToolChoice) -> None:
    assert read([CLOCK], given)[1] == expected


def test_nothing_is_required_if_every_tool_was_left_out() -> None:
    assert read([SEARCH], {"type": "any"}) == ((), ToolChoice())


def test_a_tool_that_was_left_out_is_not_required_by_name() -> None:
    named = {"type": "tool", "name": "web_search"}
    assert read([SEARCH], named) == ((), ToolChoice())
    assert read([SEARCH, CLOCK], named)[1] == ToolChoice()


@pytest.mark.parametrize(
    ("tools", "choice", "where"),
    [
        ([{"input_schema": SCHEMA}], None, "tools.0.name"),
        ([{**CLOCK, "name": "a b"}], None, "tools.0.name"),
        ([{"name": "clock"}], None, "tools.0.input_schema"),
        ([CLOCK, CLOCK], None, "tools.1.name"),
        ([CLOCK] * 513, None, "tools"),
        ([CLOCK], {"type": "tool", "name": "moon"}, "tool_choice.name"),
        ([{"type": "mcp_toolset"}, CLOCK], {"type": "tool"}, "tool_choice.name"),
        ([CLOCK], {"type": "must"}, "tool_choice.type"),
        (None, {"type": "any"}, "tool_choice"),
    ],
)
def test_a_wrong_tool_or_choice_is_refused_by_its_place(
    tools: list[Any] | None, choice: dict[str, Any] | None, where: str
) -> None:
    with pytest.raises(RequestError) as refused:
        read(tools, choice)
    assert refused.value.param == where
