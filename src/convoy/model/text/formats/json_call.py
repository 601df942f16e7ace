"""Read a call that a model writes as JSON, while it arrives: an object with its name and its arguments."""

from __future__ import annotations

import json
from collections.abc import Callable

from convoy.model.text.formats.parser import ReplyParser
from convoy.model.text.pieces import Piece

_SPACE = " \t\r\n"
_NAMES = ("name",)
_ARGUMENTS = ("arguments", "parameters")


def is_json(text: str) -> bool:
    """Return whether a text is one JSON value. NaN and Infinity are none, although Python reads them."""
    try:
        # A number may have more digits than Python converts.
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(name: str) -> None:
    raise ValueError(name)


class JsonValue:
    """Find the end of one JSON value in text that comes in parts."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._quoted = False
        self._escaped = False
        self._scalar = False

    @property
    def in_string(self) -> bool:
        """Tell whether a string is open."""
        return self._quoted

    def take(self, text: str, start: int) -> int:
        """Return the index in ``text`` behind the part of the value that begins at ``start``.

        ``done`` is true if the value ends there.
        """
        for index in range(start, len(text)):
            letter = text[index]
            if self._quoted:
                self._in_string(letter)
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]" and self._depth:
                self._depth -= 1
                self.done = not self._depth
            elif self._depth == 0 and ((self._scalar and letter in ",}]" + _SPACE) or letter in ",}]"):
                self.done = True
                return index
            else:
                self._scalar = True
            if self.done:
                return index + 1
        return len(text)

    def _in_string(self, letter: str) -> None:
        if self._escaped:
            self._escaped = False
        elif letter == "\\":
            self._escaped = True
        elif letter == '"':
            self._quoted = False
            self.done = not self._depth


class JsonArguments:
    """Pass on the one JSON object of a call's arguments, and find its end."""

    def __init__(self, parser: ReplyParser) -> None:
        self._parser = parser
        self._value = JsonValue()
        self._begun = False

    @property
    def done(self) -> bool:
        """Tell whether the object is complete."""
        return self._value.done

    @property
    def in_string(self) -> bool:
        """Tell whether a string is open."""
        return self._value.in_string

    def push(self, text: str) -> tuple[list[Piece], str]:
        """Return the pieces of ``text``, and the rest of it behind the object."""
        if not self._begun:
            text = text.lstrip(_SPACE)
            if not text:
                return [], ""
            self._begun = True
        if self.done:
            return [], text
        end = self._value.take(text, 0)
        return self._parser.go_on(text[:end]), text[end:]

    def finish(self) -> list[Piece]:
        """Return an empty object if the model wrote none."""
        return [] if self._begun else self._parser.go_on("{}")


class JsonCall:
    """Read ``{"name": ..., "arguments": {...}}``, and pass the arguments on as they arrive.

    A text of another form is kept, and `raw` returns it. Fields of other names are passed over. With
    ``names``, an object is a call only if it names one of them and has arguments.
    """

    def __init__(self, parser: ReplyParser, names: frozenset[str] | None = None) -> None:
        self._names = names
        self._parser = parser
        self._state: Callable[[], bool] = self._open
        self._text = ""
        self._at = 0
        self._value = JsonValue()
        self._value_at = 0
        self._key = ""
        self._name = ""
        self._announced = False
        self._early = ""
        self._pieces: list[Piece] = []
        self._wrote = False
        self._failed = False
        self.done = False

    @property
    def named(self) -> bool:
        """Tell whether a piece of the call was passed on, so that the text is a call for certain."""
        return self._announced

    @property
    def failed(self) -> bool:
        """Tell whether the text is certain to be no call."""
        return self._failed

    @property
    def in_string(self) -> bool:
        """Tell whether a string is open."""
        return not self.done and self._value.in_string

    @property
    def raw(self) -> str:
        """Return the whole text so far."""
        return self._text

    @property
    def rest(self) -> str:
        """Return the text behind the complete object."""
        return self._text[self._at :]

    def push(self, text: str) -> list[Piece]:
        """Take more text and return the pieces of the call that it completes."""
        self._text += text
        while not self.done and not self._failed and self._state():
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """Return the last pieces of a call with a name, as its text is over."""
        if not self._announced:
            self._failed = True
            return []
        return [] if self._wrote else self._parser.go_on("{}")

    def _skip(self, letters: str) -> str:
        """Return the next letter that is none of ``letters``, or "" if it has not come yet."""
        while self._at < len(self._text) and self._text[self._at] in letters:
            self._at += 1
        return self._text[self._at : self._at + 1]

    def _open(self) -> bool:
        letter = self._skip(_SPACE)
        if letter and letter != "{":
            self._failed = True
        self._at += letter == "{"
        self._state = self._member if letter == "{" else self._open
        return bool(letter)

    def _member(self) -> bool:
        letter = self._skip(_SPACE + ",")
        if letter == "}":
            self._at += 1
            self._failed = not self._announced
            self.done = not self._failed
        elif letter == '"':
            self._begin(self._end_of_key)
        elif letter:
            self._failed = True
        return bool(letter)

    def _begin(self, state: Callable[[], bool]) -> None:
        self._value, self._value_at, self._state = JsonValue(), self._at, state

    def _end_of_key(self) -> bool:
        self._at = self._value.take(self._text, self._at)
        if not self._value.done:
            return False
        self._key = str(_decoded(self._text[self._value_at : self._at]))
        self._state = self._colon
        return True

    def _colon(self) -> bool:
        letter = self._skip(_SPACE + ":")
        if not letter:
            return False
        self._begin(self._streamed if self._key in _ARGUMENTS and letter == "{" else self._kept)
        return True

    def _streamed(self) -> bool:
        start = self._at
        self._at = self._value.take(self._text, self._at)
        self._write(self._text[start : self._at])
        self._state = self._member if self._value.done else self._streamed
        return self._value.done

    def _kept(self) -> bool:
        self._at = self._value.take(self._text, self._at)
        if not self._value.done:
            return False
        value = _decoded(self._text[self._value_at : self._at])
        if self._key in _NAMES and isinstance(value, str) and value and not self._name:
            self._name = value
            self._failed = self._names is not None and value not in self._names
            if self._wrote or self._names is None:
                self._announce()
        elif self._key in _ARGUMENTS and isinstance(value, str):
            # Some models write the arguments as a JSON text within the JSON.
            self._write(value)
        self._state = self._member
        return True

    def _write(self, arguments: str) -> None:
        self._wrote = True
        self._early += arguments
        if self._name:
            self._announce()

    def _announce(self) -> None:
        """Pass on the name, once, and the arguments so far. Do nothing if this is no call."""
        if self._failed:
            return
        if not self._announced:
            self._announced = True
            self._pieces.append(self._parser.begin_call(self._name))
        early, self._early = self._early, ""
        self._pieces += self._parser.go_on(early)


def _decoded(text: str) -> object:
    try:
        return json.loads(text, strict=False)
    except ValueError:
        return None
