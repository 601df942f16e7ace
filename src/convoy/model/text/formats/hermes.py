"""Read ``<tool_call>{"name": ..., "arguments": ...}</tool_call>``, as Qwen2.5, Qwen3 and Hermes write it."""

from __future__ import annotations

from convoy.model.text.formats.grammar import CallRules, json_calls
from convoy.model.text.formats.json_call import JsonCall
from convoy.model.text.formats.lexer import Mark
from convoy.model.text.formats.parser import THINK, ParserOptions, ReplyParser
from convoy.model.text.pieces import Piece

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MARKS = (*THINK, OPEN, CLOSE)


class HermesParser(ReplyParser):
    """Read JSON calls between two marks."""

    def __init__(self, options: ParserOptions) -> None:
        super().__init__(options)
        self._call: JsonCall | None = None

    @property
    def may_think(self) -> bool:
        """Tell whether no call is open."""
        return self._call is None

    @property
    def in_string(self) -> bool:
        """Tell whether a string of a call is open."""
        return self._call is not None and self._call.in_string

    def on_mark(self, mark: Mark) -> list[Piece]:
        """Begin or end a call."""
        if not self.options.calls:
            return self.say(mark.shown)
        if mark.name == OPEN:
            pieces = self._end()
            self._call = JsonCall(self)
            return pieces
        return self._end(mark.shown) if mark.name == CLOSE else self.on_text(mark.shown)

    def on_text(self, text: str) -> list[Piece]:
        """Read a call's text, or text for the user."""
        return self.say(text) if self._call is None else self._call.push(text)

    def on_end(self) -> list[Piece]:
        """End an open call."""
        return self._end()

    def _end(self, shown: str = "") -> list[Piece]:
        call, self._call = self._call, None
        if call is None:
            return self.say(shown)
        pieces = call.finish()
        if call.named:
            self.section()
            return pieces
        return self.say(OPEN + call.raw + shown)


def write_grammar(rules: CallRules) -> str:
    """Return the grammar of forced calls."""
    newline = rules.text("\n")
    before, after = f"{rules.mark(OPEN)} {newline}", f"{newline} {rules.mark(CLOSE)}"
    return rules.grammar(json_calls(rules, "arguments", before=before, after=after), between=newline)
