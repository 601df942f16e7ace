"""Separate a reply's marks, the control tokens of its format, from its text.

A mark that is a token of the vocabulary is recognised by the token's id alone. If the model only spells its
text, as when it quotes a hostile document, the text stays text. Other marks are recognised by their text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mark:
    """Hold a mark. ``shown`` is the text that a reader without formats would see in its place."""

    name: str
    shown: str = ""


Lexeme = Mark | str


class Lexer:
    """Turn the tokens of one choice and their text into lexemes.

    The engine's text may come later than its token, because it may begin a stop string. So a mark has a place
    in the whole text, and is passed on when the engine's text has reached that place.
    """

    def __init__(
        self, marks: Iterable[str], tokens: Mapping[str, int], shown_of: Callable[[int], str]
    ) -> None:
        """Recognise ``marks``. ``tokens`` are the ids of those that are tokens.

        ``shown_of`` returns the text of one token, which is empty for a special token.
        """
        self._names = {number: name for name, number in tokens.items()}
        self._shown_of = shown_of
        self._scanner = TextScanner(name for name in marks if name not in tokens)
        # Marks to come: where their text begins and ends in the whole text, and their names.
        self._waiting: deque[tuple[int, int, str]] = deque()
        self._num_whole = 0
        # Text from the engine that is not passed on yet, and the place where it begins.
        self._held = ""
        self._offset = 0

    def push(self, token_id: int, whole: str, released: str) -> list[Lexeme]:
        """Take a token and return the lexemes that are complete.

        ``whole`` is the text that it adds, and ``released`` the text that the engine passes on now.
        """
        self._num_whole += len(whole)
        name = self._names.get(token_id)
        if name is not None:
            shown = self._shown_of(token_id)
            if whole.endswith(shown):
                self._waiting.append((self._num_whole - len(shown), self._num_whole, name))
        return self._release(released)

    def finish(self, released: str) -> list[Lexeme]:
        """Return the remaining lexemes; ``released`` is the engine's last text."""
        found = [*self._release(released), *self._scanner.push(self._held), *self._scanner.finish()]
        self._held = ""
        return [lexeme for lexeme in found if lexeme]

    def _release(self, released: str) -> list[Lexeme]:
        self._held += released
        found: list[Lexeme] = []
        while self._waiting and self._waiting[0][1] <= self._offset + len(self._held):
            start, end, name = self._waiting.popleft()
            found += self._scanner.push(self._take(start))
            found += self._scanner.finish()
            found.append(Mark(name, self._take(end)))
        limit = self._waiting[0][0] if self._waiting else self._offset + len(self._held)
        found += self._scanner.push(self._take(limit))
        return [lexeme for lexeme in found if lexeme]

    def _take(self, end: int) -> str:
        """Return the held text up to the place ``end``."""
        size = max(0, end - self._offset)
        taken, self._held = self._held[:size], self._held[size:]
        self._offset += len(taken)
        return taken


class TextScanner:
    """Find strings in text that comes in parts; hold back a suffix that may still become one."""

    def __init__(self, strings: Iterable[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""

    def push(self, text: str) -> list[Lexeme]:
        """Return the text and marks that are certain now."""
        text = self._held + text
        found: list[Lexeme] = []
        while (first := self._first(text)) is not None:
            start, name = first
            found += [text[:start], Mark(name, name)]
            text = text[start + len(name) :]
        kept = open_suffix(text, self._strings)
        self._held = text[len(text) - kept :]
        found.append(text[: len(text) - kept])
        return found

    def finish(self) -> list[Lexeme]:
        """Return the text that is held back."""
        held, self._held = self._held, ""
        return [held]

    def _first(self, text: str) -> tuple[int, str] | None:
        places = [(place, -len(name), name) for name in self._strings if (place := text.find(name)) >= 0]
        if not places:
            return None
        start, _, name = min(places)
        return start, name


def open_suffix(text: str, strings: Iterable[str]) -> int:
    """Return the length of the longest suffix of ``text`` that begins, and is not, one of ``strings``."""
    most = 0
    for string in strings:
        for size in range(min(len(string) - 1, len(text)), most, -1):
            if text.endswith(string[:size]):
                most = size
                break
    return most
