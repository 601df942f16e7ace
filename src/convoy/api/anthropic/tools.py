"""Read the tools of a request and the client's choice among them."""

from __future__ import annotations

from collections.abc import Sequence

from convoy.api.anthropic.bodies import MessageTool, MessageToolChoice
from convoy.api.body.body_shape import check_depth
from convoy.errors import RequestError
from convoy.model.text.conversation import MAX_TOOLS, Tool, ToolChoice, is_tool_name

# A tool without a type is the client's own too.
_OWN_TYPES = (None, "custom")


def read_tools(
    given: Sequence[MessageTool] | None, choice: MessageToolChoice | None
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Return the tools that the client runs, and the choice among them.

    Tools of other types would be run by a hosting service, so they are left out. Raises `RequestError`.
    """
    if given is not None and len(given) > MAX_TOOLS:
        raise RequestError(f"tools: {len(given)} tools, and the limit is {MAX_TOOLS}", param="tools")
    tools: dict[str, Tool] = {}
    for index, one in enumerate(given or ()):
        if one.type not in _OWN_TYPES:
            continue
        tool = _tool(one, f"tools.{index}")
        if tool.name in tools:
            raise RequestError(f"tools.{index}.name: tool names must be unique", param=f"tools.{index}.name")
        tools[tool.name] = tool
    return tuple(tools.values()), _choice(choice, tools, given or ())


def _tool(given: MessageTool, where: str) -> Tool:
    if given.name is None or not is_tool_name(given.name):
        raise RequestError(
            f"{where}.name: expected 1 to 128 letters, digits or any of _ . : / -", param=f"{where}.name"
        )
    if given.input_schema is None:
        raise RequestError(f"{where}.input_schema: field required", param=f"{where}.input_schema")
    check_depth(given.input_schema, f"{where}.input_schema")
    return Tool(given.name, given.description or "", given.input_schema, given.strict is True)


def _choice(
    given: MessageToolChoice | None, tools: dict[str, Tool], all_tools: Sequence[MessageTool]
) -> ToolChoice:
    if given is None:
        return ToolChoice()
    parallel = given.disable_parallel_tool_use is not True
    match given.type:
        case "auto":
            return ToolChoice(parallel=parallel)
        case "none":
            return ToolChoice("none")
        case "any" if all_tools:
            # Without a tool of the client's own there is nothing that could be required.
            return ToolChoice("required" if tools else "auto", parallel=parallel)
        case "any":
            raise RequestError("tool_choice: any needs tools", param="tool_choice")
        case "tool" if given.name in tools:
            return ToolChoice("required", given.name, parallel=False)
        case "tool" if given.name and any(one.name == given.name for one in all_tools):
            # A tool that was left out cannot be called.
            return ToolChoice(parallel=parallel)
        case "tool":
            raise RequestError("tool_choice.name: no tool has this name", param="tool_choice.name")
    raise RequestError(
        f"tool_choice.type: {given.type[:40]!r} is not one of: auto, any, tool, none",
        param="tool_choice.type",
    )
