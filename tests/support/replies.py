"""Replies of each format, over a vocabulary in which marks are tokens or are spelled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from convoy.model.text.conversation import Tool
from convoy.model.text.formats.lexer import Lexer
from convoy.model.text.formats.parser import ParserOptions
from convoy.model.text.formats.registry import FORMATS, FormatRow
from convoy.model.text.pieces import CallPiece, Piece, ReasoningPiece, TextPiece

ROWS = {row.name: row for row in FORMATS}
SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "lines": {"type": "array", "items": {"type": "integer"}},
        "deep": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
        "mode": {"type": "string", "enum": ["fast", "slow"]},
    },
    "required": ["path", "lines"],
}
TOOLS = (Tool("read", "Read a file.", SCHEMA), Tool("list"))

# What a reader makes of a reply: reasoning, text, and the name and arguments of each call.
Read = tuple[str, str, list[tuple[str, str]]]


class MarkVocabulary:
    """Give each mark of a format a token, and each other character its own number."""

    def __init__(self, row: FormatRow, *, special: bool) -> None:
        self.special = special
        self.tokens = {mark: 0x200000 + index for index, mark in enumerate(row.marks)}
        self._names = {number: mark for mark, number in self.tokens.items()}

    def text_of(self, token_id: int) -> str:
        """Return the text of a token as a user sees it: a special token has none."""
        if token_id in self._names:
            return "" if self.special else self._names[token_id]
        return chr(token_id)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a reply."""
        ids: list[int] = []
        position = 0
        while position < len(text):
            mark = next((one for one in self.tokens if text.startswith(one, position)), None)
            ids.append(self.tokens[mark] if mark else ord(text[position]))
            position += len(mark or "x")
        return ids


def numbers() -> Any:
    """Return a maker of ids that are the same in each run."""
    made = count()
    return lambda: f"call_{next(made)}"


def options(
    *, tools: Sequence[Tool] = TOOLS, calls: bool = True, thinking: bool = False, formed: bool = False
) -> ParserOptions:
    return ParserOptions(tuple(tools), calls, thinking, numbers(), formed)


def read_tokens(row: FormatRow, text: str, given: ParserOptions, *, special: bool) -> list[Piece]:
    """Read a reply in which each mark is one token."""
    vocabulary = MarkVocabulary(row, special=special)
    lexer, parser = Lexer(row.marks, vocabulary.tokens, vocabulary.text_of), row.parser(given)
    pieces: list[Piece] = []
    for token_id in vocabulary.encode(text):
        shown = vocabulary.text_of(token_id)
        for lexeme in lexer.push(token_id, shown, shown):
            pieces += parser.read(lexeme)
    for lexeme in lexer.finish(""):
        pieces += parser.read(lexeme)
    return [*pieces, *parser.finish()]


def read_spelled(row: FormatRow, parts: Sequence[str], given: ParserOptions) -> list[Piece]:
    """Read a reply that spells its marks, and arrives in ``parts``."""
    lexer, parser = Lexer(row.marks, {}, str), row.parser(given)
    pieces: list[Piece] = []
    for part in parts:
        for lexeme in lexer.push(-1, part, part):
            pieces += parser.read(lexeme)
    for lexeme in lexer.finish(""):
        pieces += parser.read(lexeme)
    return [*pieces, *parser.finish()]


def joined(pieces: Sequence[Piece]) -> Read:
    """Join pieces into what they say, in whatever parts they came."""
    reasoning, text = "", ""
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        match piece:
            case ReasoningPiece(more):
                reasoning += more
            case TextPiece(more):
                text += more
            case CallPiece(index=index, id=number, name=name, arguments=arguments):
                if number:
                    assert index == len(calls), "calls are numbered in order"
                    calls.append((name, ""))
                assert index == len(calls) - 1, "calls never interleave"
                calls[-1] = (calls[-1][0], calls[-1][1] + arguments)
    return reasoning, text, calls


def halves(text: str) -> Iterator[tuple[str, str]]:
    """Yield a text cut at every character."""
    for place in range(len(text) + 1):
        yield text[:place], text[place:]
