"""Describe a conversation as all three HTTP APIs give it: turns, tools, and the caller's choice among them.

Each API translates its body into these values, and the chat template renders them. All text of a value is the
caller's: no part of it may become a control token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
ToolMode = Literal["auto", "none", "required"]
ROLES = ("system", "developer", "user", "assistant", "tool")
# Of one request.
MAX_TOOLS = 512
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


def role_of(given: str) -> Role:
    """Return the role that templates know: "developer" is OpenAI's newer name for "system"."""
    roles: dict[str, Role] = {"user": "user", "assistant": "assistant", "tool": "tool"}
    return roles.get(given, "system")


def is_tool_name(name: str) -> bool:
    """Return whether a tool may have this name: 1 to 128 letters, digits or any of ``_ . : / -``."""
    return _TOOL_NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Hold one call of a tool in an assistant's turn. ``arguments`` is the JSON text of an object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Turn:
    """Hold one turn. ``calls`` and ``reasoning`` belong to the assistant; ``call_id`` to a tool's result."""

    role: Role
    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    # The name of the tool whose result this is, where the caller or the earlier call gives it.
    name: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """Hold one tool that the model may call. ``parameters`` is a JSON schema of an object."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    # Refuse the request if the schema does not compile exactly.
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Say whether tools may or must be called. ``name`` names the one tool that must be called."""

    mode: ToolMode = "auto"
    name: str = ""
    # Whether one turn may call several tools.
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class Conversation:
    """Hold the input of a chat template, and what the next turn may contain."""

    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice()
    # Variables of the template, such as enable_thinking or reasoning_effort.
    variables: Mapping[str, Any] = field(default_factory=dict)
    # Continue the last turn, an assistant's, instead of beginning a new one.
    continues: bool = False
    add_generation_prompt: bool = True


def fold_turns(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Return turns with one system turn at most, at the start, and without two turns of one user in a row.

    Many templates refuse other orders. A later system turn becomes a part of the user's turn at its place,
    because a prompt that changes at its start finds nothing in the prefix cache. It stands between tags, so
    that the model can tell it from the user's own text.
    """
    folded: list[Turn] = []
    # The texts of each folded turn. They are joined once, because a request may have thousands of turns.
    texts: list[list[str]] = []
    begun = False
    for turn in turns:
        late, begun = begun and turn.role == "system", begun or turn.role != "system"
        given = Turn("user", f"<system-reminder>\n{turn.content}\n</system-reminder>") if late else turn
        same = bool(folded) and (folded[-1].role, folded[-1].name) == (given.role, given.name)
        if same and given.role in ("system", "user"):
            texts[-1].append(given.content)
        else:
            folded.append(given)
            texts.append([given.content])
    return tuple(
        turn if len(parts) == 1 else replace(turn, content="\n\n".join(parts))
        for turn, parts in zip(folded, texts, strict=True)
    )
