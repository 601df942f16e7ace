"""Tools are offered flattened; a choice names one of them."""

from __future__ import annotations

from typing import Any

import pytest

from convoy.api.responses.tools import OfferedTools, flat_name, read_tools
from convoy.errors import RequestError
from convoy.model.text.conversation import Tool, ToolChoice

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
READ = {"type": "function", "name": "read", "description": "Read.", "parameters": SCHEMA, "strict": True}
SPACE = {
    "type": "namespace",
    "name": "mcp__disk",
    "description": "Files.",
    "tools": [{"type": "function", "name": "write"}, {"type": "custom", "name": "patch"}],
}
HOSTED = [{"type": "web_search"}, {"type": "mcp", "server_label": "x"}, {"type": "custom", "name": "patch"}]


def offered(tools: Any, choice: Any = None, *, parallel: bool = True) -> OfferedTools:
    return read_tools(tools, choice, parallel=parallel, max_tools=5)


def test_a_function_keeps_its_schema_and_its_strictness() -> None:
    assert offered([READ]).tools == (Tool("read", "Read.", SCHEMA, strict=True),)
    assert not offered([{**READ, "strict": None}]).tools[0].strict


def test_a_namespace_is_flattened_and_a_call_finds_its_way_back() -> None:
    found = offered([READ, SPACE])
    assert [tool.name for tool in found.tools] == ["read", "mcp__disk__write"]
    assert found.sources["mcp__disk__write"] == ("mcp__disk", "write")
    assert found.sources["read"] == ("", "read")


def test_a_namespace_that_ends_in_the_joint_gets_no_second_one() -> None:
    assert flat_name("mcp__disk__", "write") == flat_name("mcp__disk", "write") == "mcp__disk__write"
    assert flat_name("", "write") == "write"


def test_tools_of_other_types_are_left_out() -> None:
    found = offered([*HOSTED, READ, {"no": "type"}])
    assert [tool.name for tool in found.tools] == ["read"]
    assert [tool["type"] for tool in found.shown] == ["function"]


@pytest.mark.parametrize("mode", ["auto", "none", "required"])
def test_a_mode_is_taken_as_it_is(mode: Any) -> None:
    found = offered([READ], mode, parallel=False)
    assert (found.choice, found.shown_choice) == (ToolChoice(mode, parallel=False), mode)


def test_a_named_function_is_required() -> None:
    found = offered([READ, SPACE], {"type": "function", "name": "read"})
    assert found.choice == ToolChoice("required", "read", parallel=False)
    found = offered([READ, SPACE], {"type": "function", "name": "write", "namespace": "mcp__disk"})
    assert found.choice == ToolChoice("required", "mcp__disk__write", parallel=False)


def test_allowed_tools_leave_the_others_out() -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "read"}]}
    found = offered([READ, SPACE], choice)
    assert ([tool.name for tool in found.tools], found.choice.mode) == (["read"], "required")
    assert found.shown_choice == choice


@pytest.mark.parametrize("choice", [{"type": "web_search"}, {"type": "custom", "name": "patch"}])
def test_a_choice_of_a_tool_that_was_left_out_is_free(choice: Any) -> None:
    assert offered([*HOSTED, READ], choice).choice == ToolChoice()


def test_required_is_free_if_every_tool_was_left_out() -> None:
    assert offered(HOSTED, "required").choice == ToolChoice()


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([5], None, "tools[0]"),
        ([{"type": "function"}], None, "tools[0].name"),
        ([{"type": "function", "name": 5}], None, "tools[0].name"),
        ([{**READ, "parameters": "x"}], None, "tools[0].parameters"),
        ([{"type": "namespace", "tools": []}], None, "tools[0].name"),
        ([{"type": "namespace", "name": "x"}], None, "tools[0].tools"),
        ([READ, READ], None, "tools[1].name"),
        ([{**READ, "name": f"f{i}"} for i in range(6)], None, "tools"),
        ([READ], "sometimes", "tool_choice"),
        ([READ], 5, "tool_choice"),
        ([READ], {"type": "function"}, "tool_choice.name"),
        ([READ], {"type": "function", "name": "write"}, "tool_choice.name"),
        ([READ], {"type": "allowed_tools"}, "tool_choice.tools"),
        ([], "required", "tool_choice"),
    ],
)
def test_a_wrong_tool_or_choice_is_refused_with_its_field(tools: Any, choice: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        offered(tools, choice)
    assert caught.value.param == param
