"""Read GPT-OSS's harmony: channels with a header each. Analysis is the reasoning, and final the answer."""

from __future__ import annotations

import re
from typing import Literal

from convoy.model.text.formats.grammar import CallRules
from convoy.model.text.formats.json_call import JsonArguments
from convoy.model.text.formats.lexer import Mark
from convoy.model.text.formats.parser import ParserOptions, ReplyParser
from convoy.model.text.pieces import Piece

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
_RECIPIENT = re.compile(r"\bto=functions\.(\S+)")
_TO = " to="
_THOUGHT = r"THOUGHT: /(.|\n)*/"


class HarmonyParser(ReplyParser):
    """Read channels. A message to a function is a call, and every other one but analysis is text."""

    think = ("", "")

    def __init__(self, options: ParserOptions) -> None:
        super().__init__(options)
        # The prompt has begun the header; a reply may also be plain text.
        self._state: Literal["begin", "header", "message", "call"] = "begin"
        self._header = ""
        self._arguments = JsonArguments(self)

    def read(self, lexeme: Mark | str) -> list[Piece]:
        """Return the pieces that a mark or a text adds."""
        if isinstance(lexeme, Mark) and not self.is_text(lexeme):
            return self.on_mark(lexeme)
        return self.on_text(lexeme.shown if isinstance(lexeme, Mark) else lexeme)

    def finish(self) -> list[Piece]:
        """Return the last pieces, as no lexeme follows."""
        held = self.say(self._header) if self._state == "begin" else []
        return [*held, *self._leave(), *self.close()]

    @property
    def in_string(self) -> bool:
        """Tell whether a string of a call is open."""
        return self._state == "call" and self._arguments.in_string

    def on_mark(self, mark: Mark) -> list[Piece]:
        """Begin or end a header or a message."""
        match mark.name:
            case name if name == MESSAGE and self._state in {"begin", "header"}:
                return self._begin()
            case name if name in {START, CHANNEL, CONSTRAIN, END, CALL, RETURN}:
                in_header = self._state in {"begin", "header"} and name in {CHANNEL, CONSTRAIN}
                pieces = [] if in_header else self._leave()
                self._header = f"{self._header if in_header else ''} {name} "
                self._state = "header"
                return pieces
        return []

    def on_text(self, text: str) -> list[Piece]:
        """Read text of a header or of a message."""
        match self._state:
            case "begin":
                self._header += text
                if _TO.startswith(self._header[: len(_TO)]):
                    return []
                text, self._header, self._state = self._header, "", "message"
                return self.say(text)
            case "header":
                self._header += text
                return []
            case "call":
                return self._arguments.push(text)[0]
        return self.say(text)

    def _begin(self) -> list[Piece]:
        header, self._header = self._header, ""
        channel = header.partition(CHANNEL)[2].split()[:1]
        found = _RECIPIENT.search(header)
        if found and self.options.calls:
            self._state, self._arguments = "call", JsonArguments(self)
            return [self.begin_call(found[1])]
        self._state = "message"
        self.section(reasons=channel == ["analysis"])
        return []

    def _leave(self) -> list[Piece]:
        """End the message; a call without arguments gets an empty object."""
        state, self._state = self._state, "header"
        return self._arguments.finish() if state == "call" else []


def write_grammar(rules: CallRules) -> str:
    """Return the grammar of a forced call, which ends the reply; an analysis may come before it."""
    calls = [
        f"{rules.text('commentary to=functions.' + tool.name + ' ')} {rules.mark(CONSTRAIN)} "
        f'"json" {rules.mark(MESSAGE)} {rules.schema(tool)}'
        for tool in rules.tools
    ]
    before = f"{_turn(rules)} ({_opening(rules)} {_thought(rules)})? {rules.mark(CHANNEL)}"
    prelude, extra = write_prelude(rules, False)
    return rules.grammar(calls, before=before, single=True, extra=extra, prelude=prelude)


def write_prelude(rules: CallRules, thinking: bool) -> tuple[str, list[str]]:
    """Return the start of an answer's grammar up to its text, and its rules; an analysis may come first.

    With ``thinking`` the prompt ends inside the analysis.
    """
    first = f"{_turn(rules)} ({_opening(rules)} {_thought(rules)})?"
    analysis = _thought(rules) if thinking else first
    return f'{analysis} {rules.mark(CHANNEL)} "final" {rules.mark(MESSAGE)}', [_THOUGHT]


def _turn(rules: CallRules) -> str:
    """Return the expression of the start of the assistant's turn, unless the prompt ends with it."""
    return "" if rules.opened else f'{rules.mark(START)} "assistant"'


def _opening(rules: CallRules) -> str:
    return f'{rules.mark(CHANNEL)} "analysis" {rules.mark(MESSAGE)}'


def _thought(rules: CallRules) -> str:
    """Return the expression of an analysis, up to the next header."""
    return f'THOUGHT {rules.mark(END)} {rules.mark(START)} "assistant"'
