"""Read Gemma 4's calls and its channel of thoughts.

A call is ``<|tool_call>call:NAME{key:<|"|>text<|"|>,other:1}<tool_call|>``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from convoy.model.text.conversation import Tool
from convoy.model.text.formats.grammar import OBJECT, CallRules
from convoy.model.text.formats.json_call import is_json
from convoy.model.text.formats.lexer import Mark
from convoy.model.text.formats.parser import ParserOptions, ReplyParser
from convoy.model.text.pieces import Piece

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
CHANNEL, CHANNEL_END = "<|channel>", "<channel|>"
MARKS = (OPEN, CLOSE, QUOTE, CHANNEL, CHANNEL_END)
_PREFIX = "call:"
_THOUGHT = "thought\n"
# These end a key, which has no quotation marks.
_DELIMITERS = frozenset(":,{}[]")
# The keywords that the rules of each type enforce.
_ENFORCED = {"object": OBJECT, "array": ("items", "minItems")}


class _Values:
    """Turn Gemma's form of an object into JSON while it arrives. Keys have no quotation marks."""

    def __init__(self) -> None:
        # The brackets that are open.
        self._open: list[str] = []
        self._quoted = False
        # A key or a value without quotation marks, as far as it has come.
        self._word = ""
        self._is_key = False
        self._has_value = False
        self.done = False

    def quote(self) -> str:
        """Read a quotation mark."""
        if self._is_key:
            # A key in quotation marks is a key.
            return ""
        self._quoted = not self._quoted
        self._has_value = True
        return '"'

    def push(self, text: str) -> str:
        """Return the JSON text that ``text`` adds."""
        if self._quoted:
            return json.dumps(text, ensure_ascii=False)[1:-1]
        return "".join(self._letter(letter) for letter in text if not self.done)

    def finish(self) -> str:
        """Return the JSON text that completes the object."""
        closing = '"' if self._quoted else ("" if self._is_key else self._end_of_word())
        if self._is_key and self._word.strip():
            closing += json.dumps(self._word.strip(), ensure_ascii=False) + ": null"
        self._quoted = self._is_key = False
        self._word = ""
        while self._open:
            closing += "}" if self._open.pop() == "{" else "]"
        return closing

    def _letter(self, letter: str) -> str:
        if letter in "{[" and not self._is_key_text():
            self._open.append(letter)
            self._is_key, self._has_value = letter == "{", False
            return letter
        if letter == ":" and self._is_key:
            key, self._word, self._is_key = self._word.strip(), "", False
            self._has_value = False
            return json.dumps(key, ensure_ascii=False) + ": "
        if letter in ",}]" and self._open:
            return self._delimiter(letter)
        self._word += letter
        return ""

    def _is_key_text(self) -> bool:
        return self._is_key and bool(self._word.strip())

    def _delimiter(self, letter: str) -> str:
        ended = "" if self._is_key else self._end_of_word()
        self._word = ""
        if letter == ",":
            self._is_key, self._has_value = self._open[-1] == "{", False
            return ended + ", "
        bracket = self._open.pop()
        self._is_key, self._has_value = False, True
        self.done = not self._open
        return ended + ("}" if bracket == "{" else "]")

    def _end_of_word(self) -> str:
        word, self._word = self._word.strip(), ""
        if not word or self._has_value:
            return "" if self._has_value or not self._open or self._open[-1] == "[" else "null"
        self._has_value = True
        return word if is_json(word) else json.dumps(word, ensure_ascii=False)


class GemmaParser(ReplyParser):
    """Read calls and the channel of thoughts."""

    think = (CHANNEL, CHANNEL_END)

    def __init__(self, options: ParserOptions) -> None:
        super().__init__(options)
        self._state: Literal["text", "name", "arguments", "outside"] = "text"
        self._head = ""
        self._values = _Values()
        # The name of the channel that begins, as far as it has come.
        self._channel: str | None = None

    @property
    def may_think(self) -> bool:
        """Tell whether no call is open."""
        return self._state == "text"

    def section(self, *, reasons: bool = False) -> None:
        """Begin another section; a channel begins with its name."""
        super().section(reasons=reasons)
        self._channel = "" if reasons else None

    def say(self, text: str) -> list[Piece]:
        """Return the section's text without the name of the channel."""
        if self._channel is None:
            return super().say(text)
        self._channel += text
        if _THOUGHT.startswith(self._channel):
            return []
        text, self._channel = self._channel.removeprefix(_THOUGHT), None
        return super().say(text)

    def on_mark(self, mark: Mark) -> list[Piece]:
        """Begin or end a call, or read a quotation mark."""
        if not self.options.calls:
            return self.say(mark.shown)
        match self._state, mark.name:
            case _, name if name in {OPEN, CLOSE}:
                pieces = self._leave()
                self._state, self._head = ("name" if name == OPEN else "text"), ""
                return pieces
            case "arguments", name if name == QUOTE:
                return self.go_on(self._values.quote())
            case "text", _:
                return self.say(mark.shown)
        return []

    def on_text(self, text: str) -> list[Piece]:
        """Read a call's text, or text for the user."""
        match self._state:
            case "name":
                self._head += text
                name, brace, rest = self._head.partition("{")
                if not brace:
                    return []
                self._state, self._values = "arguments", _Values()
                begun = self.begin_call(name.strip().removeprefix(_PREFIX))
                return [begun, *self.on_text(brace + rest)]
            case "arguments":
                return self.go_on(self._values.push(text))
        return self.say(text)

    def on_end(self) -> list[Piece]:
        """End an open call; its arguments become a whole object."""
        return self._leave()

    def _leave(self) -> list[Piece]:
        state, head = self._state, self._head
        self._state, self._head = "text", ""
        if state == "arguments":
            self.section()
            return self.go_on(self._values.finish())
        return self.say(OPEN + head) if state == "name" and head else []


def write_grammar(rules: CallRules) -> str:
    """Return the grammar of forced calls."""
    writer = _ValueRules(rules)
    calls = []
    for tool in rules.tools:
        arguments = writer.arguments(tool)
        calls.append(f"{rules.mark(OPEN)} {rules.text(_PREFIX + tool.name)} {arguments} {rules.mark(CLOSE)}")
    return rules.grammar(calls, extra=writer.lines)


class _ValueRules:
    """Write the rules of values in Gemma's form, by their schemas."""

    def __init__(self, rules: CallRules) -> None:
        quote = rules.mark(QUOTE)
        self._rules = rules
        self._quote = quote
        self._num_items = 0
        self._tool = Tool("")
        self.lines = [
            f"any: string | {rules.text('true')} | {rules.text('false')} | {rules.text('null')} | NUMBER",
            f"string: {quote} {quote} | {quote} LETTERS {quote}",
            r"LETTERS: /([^<\x00-\x1f]|\n)+/",
            r"NUMBER: /-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,15})?/",
            r"INTEGER: /-?(0|[1-9][0-9]{0,14})/",
        ]

    def arguments(self, tool: Tool) -> str:
        """Return the expression of a tool's arguments. Raises `RequestError`, as `CallRules.check` does."""
        self._tool = tool
        self._rules.check(tool, tool.parameters, OBJECT)
        return self._object(tool.parameters)

    def _write(self, schema: Mapping[str, Any]) -> str:
        """Return the expression of a value."""
        choices, given = schema.get("enum"), schema.get("type")
        if isinstance(choices, list) and choices:
            self._rules.check(self._tool, schema, ("enum",))
            if any(isinstance(one, list | dict) for one in choices):
                self._rules.refuse(self._tool, "enum")
            return "(" + " | ".join(self._constant(one) for one in choices) + ")"
        listed = given if isinstance(given, list) else [given]
        kinds = list(dict.fromkeys(one for one in listed if isinstance(one, str)))
        self._rules.check(self._tool, schema, [name for kind in kinds for name in _ENFORCED.get(kind, ())])
        return "(" + " | ".join(self._of_kind(kind, schema) for kind in kinds or ["any"]) + ")"

    def _of_kind(self, kind: str, schema: Mapping[str, Any]) -> str:
        text = self._rules.text
        if kind == "array":
            return self._array(schema)
        if kind == "object":
            return self._object(schema)
        plain = {
            "string": "string",
            "integer": "INTEGER",
            "number": "NUMBER",
            "boolean": f"({text('true')} | {text('false')})",
            "null": text("null"),
        }
        return plain.get(kind, "any")

    def _array(self, schema: Mapping[str, Any]) -> str:
        text, items = self._rules.text, schema.get("items")
        if schema.get("minItems", 0) not in (0, 1):
            self._rules.refuse(self._tool, "minItems")
        # A rule of its own, because its two places would double the text with each level.
        item = f"item_{self._num_items}"
        self._num_items += 1
        self.lines.append(f"{item}: {self._write(items if isinstance(items, Mapping) else {})}")
        empty = "" if schema.get("minItems") else "?"
        return f"({text('[')} ({item} ({text(',')} {item})*){empty} {text(']')})"

    def _object(self, schema: Mapping[str, Any]) -> str:
        self._rules.check_required(self._tool, schema)
        # Required members come first, so that each optional one follows a comma if there are any.
        members = sorted(self._rules.members(schema), key=lambda member: not member[2])
        if members and not members[0][2]:
            # Without a required member, at most one optional one is written.
            parts = ["(" + " | ".join(self._member(key, value) for key, value, _ in members) + ")?"]
        else:
            parts = []
            for key, value, required in members:
                member = self._member(key, value, "," if parts else "")
                parts.append(member if required else f"({member})?")
        text = self._rules.text
        return f"({text('{')} {' '.join(parts)} {text('}')})"

    def _member(self, key: str, schema: Mapping[str, Any], before: str = "") -> str:
        if _DELIMITERS & set(key) or key.strip() != key or self._spells_mark(key):
            what = "a parameter with a bracket, a comma, a colon, a tag or outer white space in its name"
            self._rules.refuse_always(self._tool, what)
        return f"{self._rules.text(f'{before}{key}:')} {self._write(schema)}"

    def _spells_mark(self, text: str) -> bool:
        """Tell whether the parser would read a mark in ``text``. A mark that is a token is no text."""
        return any(mark in text for mark in MARKS if mark not in self._rules.tokens)

    def _constant(self, value: object) -> str:
        if isinstance(value, str):
            if self._spells_mark(value):
                what = "an enum with a value that holds one of the format's own tags"
                self._rules.refuse_always(self._tool, what)
            return (
                f"{self._quote} {self._rules.text(value)} {self._quote}"
                if value
                else f"{self._quote} {self._quote}"
            )
        return self._rules.text(json.dumps(value))
