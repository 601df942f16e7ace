"""Read ``[TOOL_CALLS]NAME[ARGS]{...}``, and the older ``[TOOL_CALLS][{"name": ..., "arguments": ...}]``."""

from __future__ import annotations

from typing import Literal

from convoy.model.text.formats.grammar import CallRules, json_calls
from convoy.model.text.formats.json_call import JsonArguments, JsonCall
from convoy.model.text.formats.lexer import Mark
from convoy.model.text.formats.parser import ParserOptions, ReplyParser
from convoy.model.text.pieces import Piece

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_THINK = ("[THINK]", "[/THINK]")
MARKS = (*_THINK, CALLS, ARGS, CALL_ID)
_SPACE = " \t\r\n"


class MistralParser(ReplyParser):
    """Read calls behind a mark, in either form."""

    think = _THINK

    def __init__(self, options: ParserOptions) -> None:
        super().__init__(options)
        self._state: Literal["text", "head", "id", "arguments", "list"] = "text"
        self._head = ""
        self._arguments = JsonArguments(self)
        self._call: JsonCall | None = None

    @property
    def may_think(self) -> bool:
        """Tell whether no call is open."""
        return self._state == "text"

    @property
    def in_string(self) -> bool:
        """Tell whether a string of a call is open."""
        return (self._state == "arguments" and self._arguments.in_string) or (
            self._call is not None and self._call.in_string
        )

    def on_mark(self, mark: Mark) -> list[Piece]:
        """Begin a call, its id or its arguments."""
        if not self.options.calls:
            return self.say(mark.shown)
        match self._state, mark.name:
            case _, name if name == CALLS:
                pieces = self._leave()
                self._state, self._head = "head", ""
                return pieces
            case "head", name if name == CALL_ID:
                self._state = "id"
                return []
            case (("head" | "id"), name) if name == ARGS:
                return self._begin("")
        return self.on_text(mark.shown)

    def on_text(self, text: str) -> list[Piece]:
        """Read a call's text, or text for the user."""
        match self._state:
            case "head":
                return self._read_head(text)
            case "arguments":
                pieces, rest = self._arguments.push(text)
                return [*pieces, *self._to_text(rest)] if self._arguments.done else pieces
            case "list":
                return self._read_list(text)
            case "id":
                return []
        return self.say(text)

    def on_end(self) -> list[Piece]:
        """End an open call."""
        return self._leave()

    def _read_head(self, text: str) -> list[Piece]:
        self._head += text
        head = self._head.lstrip(_SPACE)
        if head.startswith("["):
            self._state = "list"
            return self._read_list(head[1:])
        name, brace, rest = head.partition("{")
        self._head = name if brace else head
        return self._begin(brace + rest) if brace else []

    def _begin(self, text: str) -> list[Piece]:
        self._state, self._arguments = "arguments", JsonArguments(self)
        return [self.begin_call(self._head.strip()), *(self.on_text(text) if text else [])]

    def _read_list(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text:
            if self._call is None:
                text = text.lstrip(_SPACE + ",")
                if text.startswith("]"):
                    return [*pieces, *self._to_text(text[1:])]
                if not text:
                    break
                self._call = JsonCall(self)
            pieces += self._call.push(text)
            if self._call.failed:
                return [*pieces, *self._to_text(self._call.raw)]
            text = ""
            if self._call.done:
                pieces += self._call.finish()
                text, self._call = self._call.rest, None
        return pieces

    def _leave(self) -> list[Piece]:
        """End what is open."""
        state, call = self._state, self._call
        self._state, self._call = "text", None
        if state == "head" and self._head:
            return self.say(CALLS + self._head)
        if state == "arguments":
            return self._arguments.finish()
        if call is None:
            return []
        pieces = call.finish()
        return pieces if call.named else self.say(call.raw)

    def _to_text(self, rest: str) -> list[Piece]:
        self._state, self._call = "text", None
        self.section()
        return self.say(rest)


def write_grammar(rules: CallRules) -> str:
    """Return the grammar of forced calls, in the older form if the model has no mark for arguments."""
    if ARGS in rules.tokens:
        return rules.grammar(
            [
                f"{rules.mark(CALLS)} {rules.text(tool.name)} {rules.mark(ARGS)} {rules.schema(tool)}"
                for tool in rules.tools
            ]
        )
    calls = json_calls(rules, "arguments")
    opening = f"{rules.mark(CALLS)} {rules.text('[')}"
    return rules.grammar(calls, before=opening, between=rules.text(", "), after=rules.text("]"))
