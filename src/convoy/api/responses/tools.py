"""Read the tools of a Responses request, and the caller's choice among them.

A namespace is flattened: its functions become tools under joined names, and a call of one carries the
namespace and the function's own name again. Tools that a hosting service would run are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from convoy.api.body.body_shape import check_depth
from convoy.errors import RequestError
from convoy.model.text.conversation import Tool, ToolChoice, ToolMode, is_tool_name

_MODES: Mapping[str, ToolMode] = {"auto": "auto", "none": "none", "required": "required"}
_JOINT = "__"


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """Hold the functions that the model may call.

    ``sources`` maps a tool's name to its namespace and its name there. ``shown`` and ``shown_choice`` are the
    tools and the choice as the answer repeats them.
    """

    tools: tuple[Tool, ...]
    choice: ToolChoice
    sources: Mapping[str, tuple[str, str]]
    shown: Sequence[Mapping[str, Any]]
    shown_choice: str | Mapping[str, Any]


def flat_name(namespace: str, name: str) -> str:
    """Return the name of a namespace's function among the model's tools."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith(_JOINT) else f"{namespace}{_JOINT}{name}"


def read_tools(given: Sequence[Any] | None, choice: Any, *, parallel: bool, max_tools: int) -> OfferedTools:
    """Return the functions of ``given``, flattened, and the choice among them.

    Raises `RequestError` for a function without a name, with parameters that are no object or with the name
    of another one, for a choice of a function that is not offered, and for more than ``max_tools``.
    """
    reader = _Reader(max_tools)
    for index, tool in enumerate(given or ()):
        reader.read(tool, f"tools[{index}]")
    tools, sources = tuple(reader.tools), reader.sources
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = _allowed(choice)
        tools = tuple(tool for tool in tools if tool.name in allowed)
    asked, shown_choice = _choice(choice, {tool.name for tool in tools}, parallel=parallel)
    if asked.mode == "required" and not tools:
        if not given:
            text = "tool_choice asks for a call, and tools has no function"
            raise RequestError(text, param="tool_choice")
        # Every tool was left out, so there is nothing that could be required.
        asked, shown_choice = ToolChoice(parallel=parallel), "auto"
    return OfferedTools(tools, asked, sources, tuple(reader.shown), shown_choice)


class _Reader:
    def __init__(self, max_tools: int) -> None:
        self.tools: list[Tool] = []
        self.sources: dict[str, tuple[str, str]] = {}
        self.shown: list[dict[str, Any]] = []
        self._max_tools = max_tools

    def read(self, tool: Any, where: str) -> None:
        if not isinstance(tool, dict):
            raise RequestError(f"{where} is not an object", param=where, code="invalid_type")
        match tool.get("type"):
            case "function":
                self.shown.append(self._function(tool, "", where))
            case "namespace":
                self.shown.append(self._namespace(tool, where))

    def _namespace(self, given: Mapping[str, Any], where: str) -> dict[str, Any]:
        name, members = _name(given, where), given.get("tools")
        if not isinstance(members, list):
            raise RequestError(f"{where}.tools: expected a list", param=f"{where}.tools", code="invalid_type")
        shown = []
        for index, member in enumerate(members):
            if isinstance(member, dict) and member.get("type") == "function":
                shown.append(self._function(member, name, f"{where}.tools[{index}]"))
        return {"type": "namespace", "name": name, "description": _description(given), "tools": shown}

    def _function(self, given: Mapping[str, Any], namespace: str, where: str) -> dict[str, Any]:
        name, parameters = _name(given, where), given.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            param = f"{where}.parameters"
            raise RequestError(f"{param}: expected an object", param=param, code="invalid_type")
        check_depth(parameters, f"{where}.parameters")
        flat, strict = flat_name(namespace, name), given.get("strict") is True
        if not is_tool_name(flat):
            text = f"{where}.name: expected 1 to 128 letters, digits or any of _ . : / -"
            raise RequestError(text, param=f"{where}.name")
        if flat in self.sources:
            raise RequestError(f"{where}.name is that of another tool", param=f"{where}.name")
        if len(self.tools) == self._max_tools:
            text = f"tools has more than {self._max_tools} functions, and that is the limit"
            raise RequestError(text, param="tools")
        self.sources[flat] = (namespace, name)
        self.tools.append(Tool(flat, _description(given), parameters or {}, strict))
        shown = {"type": "function", "name": name, "description": _description(given)}
        return {**shown, "parameters": parameters, "strict": strict}


def _choice(choice: Any, names: set[str], *, parallel: bool) -> tuple[ToolChoice, str | Mapping[str, Any]]:
    """Return the choice, and how the answer repeats it."""
    if choice is None:
        return ToolChoice(parallel=parallel), "auto"
    if isinstance(choice, str) and choice in _MODES:
        return ToolChoice(_MODES[choice], parallel=parallel), choice
    if not isinstance(choice, dict) or not isinstance(choice.get("type"), str):
        text = "tool_choice: expected auto, none, required or an object with a type"
        raise RequestError(text, param="tool_choice")
    if choice["type"] == "allowed_tools":
        mode: ToolMode = "required" if choice.get("mode") == "required" else "auto"
        shown = {"type": "allowed_tools", "mode": mode, "tools": choice["tools"]}
        return ToolChoice(mode, parallel=parallel), shown
    if choice["type"] != "function":
        # A tool of another type is left out, so it cannot be called.
        return ToolChoice(parallel=parallel), "auto"
    name = _name(choice, "tool_choice")
    flat = flat_name(_namespace_of(choice), name)
    if flat not in names:
        raise RequestError("tool_choice.name is no function of tools", param="tool_choice.name")
    return ToolChoice("required", flat, parallel=False), {"type": "function", "name": name}


def _allowed(choice: Mapping[str, Any]) -> set[str]:
    given = choice.get("tools")
    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        param = "tool_choice.tools"
        raise RequestError(f"{param}: expected a list of objects", param=param, code="invalid_type")
    return {
        flat_name(_namespace_of(tool), tool["name"])
        for tool in given
        if tool.get("type") == "function" and isinstance(tool.get("name"), str)
    }


def _namespace_of(given: Mapping[str, Any]) -> str:
    namespace = given.get("namespace")
    return namespace if isinstance(namespace, str) else ""


def _name(given: Mapping[str, Any], where: str) -> str:
    name, param = given.get("name"), f"{where}.name"
    if name is None or name == "":
        raise RequestError(f"{param}: it is missing", param=param, code="missing_required_parameter")
    if not isinstance(name, str):
        raise RequestError(f"{param}: expected text", param=param, code="invalid_type")
    return name


def _description(given: Mapping[str, Any]) -> str:
    description = given.get("description")
    return description if isinstance(description, str) else ""
