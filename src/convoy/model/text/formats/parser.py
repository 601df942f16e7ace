"""Turn marks and text of a reply into pieces; plain text and ``<think>`` reasoning are read here."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from convoy.model.text.conversation import Tool
from convoy.model.text.formats.lexer import Lexeme, Mark
from convoy.model.text.pieces import CallPiece, Piece, ReasoningPiece, TextPiece

THINK = ("<think>", "</think>")


def make_call_id() -> str:
    """Return a new id of a call."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class ParserOptions:
    """Hold the facts of a request that its parser needs."""

    tools: tuple[Tool, ...] = ()
    # Whether calls are looked for; otherwise their text is text for the user.
    calls: bool = False
    # Whether the prompt ends inside a reasoning.
    thinking: bool = False
    make_id: Callable[[], str] = make_call_id
    # Whether a text outside of reasoning and calls has a form, in which a spelled mark is text.
    formed: bool = False


class ReplyParser:
    """Read a reply of one choice.

    This class reads reasoning between two marks. A format extends it: `on_mark` and `on_text` see everything
    that is neither reasoning nor its marks. The way the text was cut never changes the pieces' texts.
    """

    think: Sequence[str] = THINK

    def __init__(self, options: ParserOptions) -> None:
        self.options = options
        self._reasons = options.thinking
        # Newlines that are dropped if the section ends before other text comes.
        self._newlines = ""
        # Whether newlines at the beginning of the section are dropped.
        self._fresh = options.thinking
        # Whether there was text outside of reasoning.
        self._said = False
        self._index = -1

    @property
    def num_calls(self) -> int:
        """Return the number of calls so far."""
        return self._index + 1

    def read(self, lexeme: Lexeme) -> list[Piece]:
        """Return the pieces that a mark or a text adds."""
        if isinstance(lexeme, Mark) and self.is_text(lexeme):
            lexeme = lexeme.shown
        if isinstance(lexeme, Mark):
            if lexeme.name in self.think and self.may_think:
                self.section(reasons=lexeme.name == self.think[0])
                return []
            return self.say(lexeme.shown) if self._reasons else self.on_mark(lexeme)
        return self.say(lexeme) if self._reasons else self.on_text(lexeme)

    def finish(self) -> list[Piece]:
        """Return the last pieces, as no lexeme follows."""
        return self.close() if self._reasons else [*self.on_end(), *self.close()]

    @property
    def may_think(self) -> bool:
        """Tell whether a mark of reasoning counts now: not within a call."""
        return True

    @property
    def in_string(self) -> bool:
        """Tell whether a JSON string of a call is open, in which a spelled mark is text."""
        return False

    def is_text(self, mark: Mark) -> bool:
        """Tell whether a mark is text here, by its letters alone: in a string, or in a text with a form."""
        return mark.spelled and (self.in_string or (self.options.formed and self._said))

    def on_mark(self, mark: Mark) -> list[Piece]:
        """Read a mark outside of reasoning."""
        return self.say(mark.shown)

    def on_text(self, text: str) -> list[Piece]:
        """Read text outside of reasoning."""
        return self.say(text)

    def on_end(self) -> list[Piece]:
        """Read the end of the reply outside of reasoning."""
        return []

    def section(self, *, reasons: bool = False) -> None:
        """Begin another reasoning or text, and drop the newlines between the two."""
        self._reasons = reasons
        self._newlines = ""
        self._fresh = True

    def say(self, text: str) -> list[Piece]:
        """Return ``text`` as the section's, but for newlines at its edges."""
        if self._fresh:
            text = text.lstrip("\n")
            self._fresh = not text
        text = self._newlines + text
        core = text.rstrip("\n")
        self._newlines = text[len(core) :]
        self._said = self._said or (bool(core) and not self._reasons)
        return self._section_piece(core)

    def close(self) -> list[Piece]:
        """Return the newlines at the end of a reply's text; those of a reasoning are dropped."""
        rest, self._newlines = self._newlines, ""
        return [] if self._reasons else self._section_piece(rest)

    def begin_call(self, name: str) -> CallPiece:
        """Return the first piece of another call."""
        self._index += 1
        return CallPiece(self._index, self.options.make_id(), name)

    def go_on(self, arguments: str) -> list[Piece]:
        """Return a further piece of the call's arguments."""
        return [CallPiece(self._index, arguments=arguments)] if arguments else []

    def tool(self, name: str) -> Tool | None:
        """Return the tool with that name."""
        return next((tool for tool in self.options.tools if tool.name == name), None)

    def _section_piece(self, text: str) -> list[Piece]:
        if not text:
            return []
        return [ReasoningPiece(text) if self._reasons else TextPiece(text)]
