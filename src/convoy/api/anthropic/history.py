"""Read the messages of a request as the turns of a conversation.

Clients replay what they received, also from other servers. So blocks of kinds that this server never makes
are dropped and counted, and only what changes the meaning of the conversation is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from convoy.api.anthropic.bodies import InputMessage
from convoy.api.body.body_shape import check_depth
from convoy.errors import RequestError
from convoy.model.text.conversation import ToolCall, Turn, fold_turns

ROLES = ("user", "assistant", "system")
# Claude Code's first system block begins with this. It changes with every conversation, so no two of them
# would share a cached prefix.
BILLING_HEADER = "x-anthropic-billing-header"
_REFUSED = frozenset({"image", "document"})
_MAX_ID_CHARS = 256


def read_history(
    system: str | Sequence[Mapping[str, Any]] | None, messages: Sequence[InputMessage], *, max_parts: int
) -> MessageHistory:
    """Return the turns of a request and the types of its dropped blocks.

    Raises `RequestError` for other roles than `ROLES`, blocks without their fields, images and documents, a
    result of a call that was never made, and more than ``max_parts`` messages or blocks.
    """
    if not messages:
        raise RequestError("messages: at least one message is required", param="messages")
    num_blocks = sum(len(one.content) for one in messages if isinstance(one.content, list))
    for count, what in ((len(messages), "messages"), (num_blocks, "blocks")):
        if count > max_parts:
            raise RequestError(f"messages: {count} {what}, and the limit is {max_parts}", param="messages")
    history = MessageHistory()
    history.add_system(system)
    for index, message in enumerate(messages):
        history.add(message, f"messages.{index}")
    history.end()
    return history


class MessageHistory:
    """Hold the turns so far, the name of each call by its id, and the types of dropped blocks."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.dropped: list[str] = []
        self._calls: dict[str, str] = {}

    def add_system(self, system: str | Sequence[Mapping[str, Any]] | None) -> None:
        """Add the system prompt, without a billing header."""
        texts = [] if system is None else self._texts(system, "system")
        if not isinstance(system, str):
            texts = [text for text in texts if not text.startswith(BILLING_HEADER)]
        if any(texts):
            self.turns.append(Turn("system", "\n".join(texts)))

    def add(self, message: InputMessage, where: str) -> None:
        match message.role:
            case "user":
                self._add_user(message.content, where)
            case "assistant":
                self._add_assistant(message.content, where)
            case "system":
                texts = self._texts(message.content, f"{where}.content")
                if any(texts):
                    self._drop_lone_reasoning()
                    self.turns.append(Turn("system", "\n".join(texts)))
            case other:
                raise RequestError(
                    f"{where}.role: {other[:40]!r} is not one of: {', '.join(ROLES)}", param=f"{where}.role"
                )

    def end(self) -> None:
        """Check the last turn and fold all. An answer continues an assistant's text, but not its calls."""
        if not any(turn.role != "system" for turn in self.turns):
            raise RequestError("messages: no message has any text", param="messages")
        if self.turns[-1].calls:
            raise RequestError(
                "messages: the last message has tool_use blocks, and tool_result blocks must follow them",
                param="messages",
            )
        self.turns = list(fold_turns(self.turns))

    def _add_user(self, content: str | list[dict[str, Any]], where: str) -> None:
        self._drop_lone_reasoning()
        texts: list[str] = []
        for block, place in self._blocks(content, f"{where}.content"):
            match block.get("type"):
                case "text":
                    texts.append(_field(block, "text", place))
                case "tool_result":
                    self._add_text(texts)
                    self.turns.append(self._result(block, place))
                case _:
                    self._drop(block, place)
        self._add_text(texts)

    def _add_assistant(self, content: str | list[dict[str, Any]], where: str) -> None:
        texts, reasoning, calls = [], [], []
        for block, place in self._blocks(content, f"{where}.content"):
            match block.get("type"):
                case "text":
                    texts.append(_field(block, "text", place))
                case "thinking":
                    # The signature is not needed: the text is the client's, as every other text is.
                    reasoning.append(_field(block, "thinking", place))
                case "tool_use":
                    calls.append(self._call(block, place))
                case _:
                    self._drop(block, place)
        turn = Turn("assistant", "".join(texts), "".join(reasoning), tuple(calls))
        last = self.turns[-1] if self.turns else None
        if last is not None and last.role == "assistant":
            joined = replace(
                last,
                content=last.content + turn.content,
                reasoning=last.reasoning + turn.reasoning,
                calls=last.calls + turn.calls,
            )
            self.turns[-1] = joined
        elif turn.content or turn.reasoning or turn.calls:
            self.turns.append(turn)

    def _drop_lone_reasoning(self) -> None:
        """Drop the last turn if it has only reasoning, because no template has such a turn before another."""
        last = self.turns[-1] if self.turns else None
        if last is not None and last.reasoning and not (last.content or last.calls):
            self.turns.pop()
            self.dropped.append("thinking")

    def _add_text(self, texts: list[str]) -> None:
        """Add the user's texts as one turn, and empty the list."""
        if any(texts):
            self.turns.append(Turn("user", "\n".join(text for text in texts if text)))
        texts.clear()

    def _result(self, block: Mapping[str, Any], where: str) -> Turn:
        call_id = _field(block, "tool_use_id", where)
        if call_id not in self._calls:
            raise RequestError(
                f"{where}.tool_use_id: no earlier tool_use block has this id", param=f"{where}.tool_use_id"
            )
        content = block.get("content")
        texts = [] if content is None else self._texts(content, f"{where}.content")
        return Turn("tool", "\n".join(texts), call_id=call_id, name=self._calls[call_id])

    def _call(self, block: Mapping[str, Any], where: str) -> ToolCall:
        call_id, name, given = _field(block, "id", where), _field(block, "name", where), block.get("input")
        if not isinstance(given, dict):
            raise RequestError(f"{where}.input: expected an object", param=f"{where}.input")
        for field, text in (("id", call_id), ("name", name)):
            if not 0 < len(text) <= _MAX_ID_CHARS:
                raise RequestError(
                    f"{where}.{field}: expected 1 to {_MAX_ID_CHARS} characters", param=f"{where}.{field}"
                )
        check_depth(given, f"{where}.input")
        self._calls[call_id] = name
        return ToolCall(call_id, name, msgspec.json.encode(given).decode())

    def _texts(self, content: object, where: str) -> list[str]:
        """Return the texts of a content, and drop its blocks of other kinds."""
        texts = []
        for block, place in self._blocks(content, where):
            if block.get("type") == "text":
                texts.append(_field(block, "text", place))
            else:
                self._drop(block, place)
        return texts

    def _blocks(self, content: object, where: str) -> list[tuple[Mapping[str, Any], str]]:
        if isinstance(content, str):
            return [({"type": "text", "text": content}, where)]
        if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
            raise RequestError(f"{where}: expected text or a list of blocks", param=where)
        return [(block, f"{where}.{index}") for index, block in enumerate(content)]

    def _drop(self, block: Mapping[str, Any], where: str) -> None:
        kind = block.get("type")
        if not isinstance(kind, str):
            raise RequestError(f"{where}.type: expected text", param=f"{where}.type")
        if kind in _REFUSED:
            raise RequestError(
                f"{where}.type: this server takes no {kind}, only text",
                param=f"{where}.type",
                code="unsupported_parameter",
            )
        self.dropped.append(kind)


def _field(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        what = "field required" if value is None else "expected text"
        raise RequestError(f"{where}.{name}: {what}", param=f"{where}.{name}")
    return value
