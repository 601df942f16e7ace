"""Read ``{"name": ..., "parameters": ...}``, bare or behind ``<|python_tag|>``, as Llama 3 writes it."""

from __future__ import annotations

from typing import Literal

from convoy.model.text.formats.grammar import CallRules, json_calls
from convoy.model.text.formats.json_call import JsonCall
from convoy.model.text.formats.lexer import Mark
from convoy.model.text.formats.parser import THINK, ParserOptions, ReplyParser
from convoy.model.text.pieces import Piece

TAG = "<|python_tag|>"
MARKS = (*THINK, TAG)
_SPACE = " \t\r\n"


class LlamaParser(ReplyParser):
    """Read JSON calls at the beginning of a reply. JSON that calls no known tool is text."""

    def __init__(self, options: ParserOptions) -> None:
        super().__init__(options)
        # "start" and "between" may begin a call.
        self._state: Literal["start", "call", "between", "text"] = "start" if options.calls else "text"
        self._call: JsonCall | None = None
        self._held = ""

    @property
    def may_think(self) -> bool:
        """Tell whether no call is open."""
        return self._call is None

    @property
    def in_string(self) -> bool:
        """Tell whether a string of a call is open."""
        return self._call is not None and self._call.in_string

    def on_mark(self, mark: Mark) -> list[Piece]:
        """Expect a call behind the tag."""
        if mark.name != TAG or not self.options.calls or self._call is not None:
            return self.on_text(mark.shown)
        pieces = self._to_text() if self._held else []
        self._state, self._held = "between", mark.shown
        return pieces

    def on_text(self, text: str) -> list[Piece]:
        """Read a call's text, or text for the user."""
        if self._state == "text":
            return self.say(text)
        if self._call is None:
            self._held += text
            core = self._held.removeprefix(TAG).lstrip(_SPACE + (";" if self._state == "between" else ""))
            if not core or (self._state == "between" and TAG.startswith(core)):
                return []
            if not core.startswith("{"):
                return self._to_text()
            names = frozenset(tool.name for tool in self.options.tools)
            self._state, self._call = "call", JsonCall(self, names)
            text = core
        return self._read_call(text)

    def on_end(self) -> list[Piece]:
        """End an open call."""
        call = self._call
        if call is None:
            return self._to_text() if self._state == "start" else []
        pieces = call.finish()
        return pieces if call.named else self._to_text(call.raw)

    def _read_call(self, text: str) -> list[Piece]:
        assert self._call is not None
        pieces = self._call.push(text)
        if self._call.failed:
            return self._to_text(self._call.raw)
        if not self._call.done:
            return pieces
        pieces += self._call.finish()
        rest, self._call, self._held = self._call.rest, None, ""
        self._state = "between"
        self.section()
        return [*pieces, *(self.on_text(rest) if rest else [])]

    def _to_text(self, text: str | None = None) -> list[Piece]:
        """Say what is held back, as it is no call."""
        held, self._held, self._call, self._state = self._held if text is None else text, "", None, "text"
        return self.say(held)


def write_grammar(rules: CallRules) -> str:
    """Return the grammar of a forced call; this format has one at a time."""
    return rules.grammar(json_calls(rules, "parameters"), single=True)
