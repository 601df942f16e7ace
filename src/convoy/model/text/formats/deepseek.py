"""Read DeepSeek V3.1's calls: ``<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>``.

DeepSeek V3 and R1 write ``function`` in the name's place, then the name and JSON in a fenced block of code.
"""

from __future__ import annotations

from typing import Literal

from convoy.model.text.formats.grammar import CallRules
from convoy.model.text.formats.json_call import JsonArguments
from convoy.model.text.formats.lexer import Mark
from convoy.model.text.formats.parser import THINK, ParserOptions, ReplyParser
from convoy.model.text.pieces import Piece

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
MARKS = (*THINK, BEGIN, END, CALL, SEPARATOR, CALL_END)
_TYPE = "function"
_CODE = "\n```json\n"


class DeepSeekParser(ReplyParser):
    """Read calls between marks."""

    def __init__(self, options: ParserOptions) -> None:
        super().__init__(options)
        self._state: Literal["text", "outside", "name", "code", "arguments"] = "text"
        self._head = ""
        self._arguments = JsonArguments(self)

    @property
    def may_think(self) -> bool:
        """Tell whether no call is open."""
        return self._state == "text"

    @property
    def in_string(self) -> bool:
        """Tell whether a string of a call is open."""
        return self._state == "arguments" and self._arguments.in_string

    def on_mark(self, mark: Mark) -> list[Piece]:
        """Begin or end a call or one of its parts."""
        if not self.options.calls:
            return self.say(mark.shown)
        match self._state, mark.name:
            case ("name", name) if name == SEPARATOR:
                return self._separate()
            case (_, name) if name in {BEGIN, CALL, CALL_END, END}:
                pieces = self._leave()
                self._state = {BEGIN: "outside", CALL: "name", CALL_END: "outside", END: "text"}[name]  # type: ignore[assignment]
                self.section()
                return pieces
        return self.on_text(mark.shown)

    def on_text(self, text: str) -> list[Piece]:
        """Read a call's text, or text for the user."""
        match self._state:
            case "name":
                self._head += text
            case "code":
                self._head += text
                name, found, rest = self._head.partition(_CODE)
                if found:
                    self._head = name
                    return self._begin(rest)
            case "arguments":
                return self._arguments.push(text)[0]
            case "text":
                return self.say(text)
        return []

    def on_end(self) -> list[Piece]:
        """End an open call."""
        return self._leave()

    def _separate(self) -> list[Piece]:
        if self._head.strip() == _TYPE and self.tool(_TYPE) is None:
            self._state, self._head = "code", ""
            return []
        return self._begin("")

    def _begin(self, text: str) -> list[Piece]:
        name, self._head = self._head.strip(), ""
        self._state, self._arguments = "arguments", JsonArguments(self)
        return [self.begin_call(name), *(self.on_text(text) if text else [])]

    def _leave(self) -> list[Piece]:
        """End what is open."""
        state, head = self._state, self._head
        self._state, self._head = "outside", ""
        if state in {"name", "code"} and head:
            self._state = "text"
            return self.say(head)
        return self._arguments.finish() if state == "arguments" else []


def write_grammar(rules: CallRules) -> str:
    """Return the grammar of forced calls."""
    calls = [
        f"{rules.mark(CALL)} {rules.text(tool.name)} {rules.mark(SEPARATOR)} {rules.schema(tool)} "
        f"{rules.mark(CALL_END)}"
        for tool in rules.tools
    ]
    return rules.grammar(calls, before=rules.mark(BEGIN), after=rules.mark(END))
