"""Read calls that are written as tags: those of Qwen3-Coder and Qwen3.5, and DeepSeek's DSML.

A parameter's value is text. The tool's schema, or DSML's attribute ``string``, tells whether it is JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from convoy.model.text.conversation import Tool
from convoy.model.text.formats.grammar import DEFINITIONS, CallRules
from convoy.model.text.formats.json_call import JsonValue, is_json
from convoy.model.text.formats.lexer import Mark, TextScanner
from convoy.model.text.formats.parser import THINK, ParserOptions, ReplyParser
from convoy.model.text.pieces import Piece

Kind = Literal["open", "close", "call", "end of call", "key", "end of key"]
_State = Literal["text", "outside", "name", "body", "key", "value"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
QWEN_MARKS = (*THINK, OPEN, CLOSE)
DSML = "｜DSML｜"
DSML_MARKS = (*THINK, DSML)
# It stands for DSML's mark within a text. The model's own such letters are replaced.
_PLACE = "\ufdd0"
_LITERALS = {"True": "true", "False": "false", "None": "null"}
_NULLS = frozenset({"null", "None"})
_DSML_ENDS = ("parameter", "function_calls", "tool_calls")
_ATTRIBUTE = re.compile(r'([^"]*)"(?:\s+string="(true|false)")?')


class ArgumentWriter:
    """Write the JSON text of a call's arguments, from keys and values that arrive in parts."""

    def __init__(self, parser: ReplyParser, tool: Tool | None, *, trims: bool) -> None:
        """Write for ``tool``. With ``trims``, a newline at each end of a value belongs to its tags."""
        self._parser = parser
        properties = tool.parameters.get("properties") if tool else None
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._trims = trims
        self._num_keys = 0
        self._streams = False
        self._types: frozenset[str] = frozenset()
        self._held = ""
        self._fresh = False
        self._value = JsonValue()

    @property
    def in_string(self) -> bool:
        """Tell whether a string within a JSON object or list is open, in which a tag is text."""
        # Where a text is allowed, it may begin like JSON and end like none.
        if "string" in self._types:
            return False
        return self._held.lstrip()[:1] in {"{", "["} and self._value.in_string

    def open(self, key: str, is_text: bool | None) -> list[Piece]:
        """Begin a value. ``is_text`` None leaves it to the schema whether it is text or JSON."""
        schema = self._properties.get(key)
        self._types = _types(schema) if is_text is None else frozenset(["string"] if is_text else ["any"])
        self._streams = self._types == {"string"}
        self._held, self._fresh, self._value = "", self._trims, JsonValue()
        opening = (", " if self._num_keys else "{") + json.dumps(key, ensure_ascii=False) + ": "
        self._num_keys += 1
        return self._parser.go_on(opening + ('"' if self._streams else ""))

    def text(self, text: str) -> list[Piece]:
        """Take a part of the value."""
        if self._fresh and text:
            self._fresh = False
            text = text.removeprefix("\n")
        self._held += text
        if not self._streams:
            if not self._value.done:
                self._value.take(text, 0)
            return []
        kept = 1 if self._trims and self._held.endswith("\n") else 0
        shown, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return self._parser.go_on(_quoted(shown)[1:-1])

    def close(self) -> list[Piece]:
        """End the value."""
        if self._streams:
            return self._parser.go_on('"')
        held = self._held.removesuffix("\n") if self._trims else self._held
        return self._parser.go_on(self._json(held))

    def end(self) -> list[Piece]:
        """End the arguments."""
        return self._parser.go_on("}" if self._num_keys else "{}")

    def _json(self, text: str) -> str:
        literal = _LITERALS.get(text.strip(), text.strip())
        if "string" in self._types and not (literal == "null" and "null" in self._types):
            return _quoted(text)
        return literal if is_json(literal) else _quoted(text)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _types(schema: object) -> frozenset[str]:
    """Return the JSON types that a schema allows; "string" for no schema, and "any" for one without types."""
    if not isinstance(schema, Mapping):
        return frozenset(["string"])
    given = schema.get("type")
    types = {given} if isinstance(given, str) else set()
    types |= {one for one in given if isinstance(one, str)} if isinstance(given, list) else set()
    for name in ("anyOf", "oneOf"):
        choices = schema.get(name)
        for choice in choices if isinstance(choices, list) else ():
            types |= _types(choice)
    choices = schema.get("enum")
    if not types and isinstance(choices, list) and all(isinstance(one, str) for one in choices):
        types = {"string"}
    return frozenset(types or {"any"})


class TagParser(ReplyParser):
    """Read calls between tags. A dialect names its tags, and reads the headers of calls and parameters."""

    kinds: Mapping[str, Kind]
    trims = False

    def __init__(self, options: ParserOptions) -> None:
        super().__init__(options)
        self._state: _State = "text"
        # The lexer finds the other tags.
        self._scanner = TextScanner(tag for tag in self.kinds if tag not in QWEN_MARKS)
        self._header = ""
        # The text since the opening tag; None once a call has begun.
        self._raw: str | None = None
        self._writer: ArgumentWriter | None = None

    @property
    def may_think(self) -> bool:
        """Tell whether no call is open."""
        return self._state == "text"

    @property
    def in_string(self) -> bool:
        """Tell whether a string within a JSON value is open."""
        return self._state == "value" and self._writer is not None and self._writer.in_string

    def on_mark(self, mark: Mark) -> list[Piece]:
        """Read a mark as a tag."""
        if not self.options.calls:
            return self.say(mark.shown)
        return [*self._flush(), *self._tag(mark)]

    def on_text(self, text: str) -> list[Piece]:
        """Find the tags in a text."""
        if not self.options.calls:
            return self.say(text)
        pieces: list[Piece] = []
        for lexeme in self._scanner.push(text):
            pieces += self._tag(lexeme) if isinstance(lexeme, Mark) else self._take(lexeme)
        return pieces

    def on_end(self) -> list[Piece]:
        """End an open call; its arguments become a whole object."""
        return [*self._flush(), *self._leave("")]

    def shown(self, text: str) -> str:
        """Return a tag or a text as the user would see it."""
        return text

    def read_name(self, header: str) -> str:
        """Return the name of a call from the text between its tag and ``>``."""
        return header.strip()

    def read_key(self, header: str) -> tuple[str, bool | None]:
        """Return the name of a parameter, and whether its value is text."""
        return header.strip(), None

    def _flush(self) -> list[Piece]:
        return [
            piece
            for lexeme in self._scanner.finish()
            if isinstance(lexeme, str)
            for piece in self._take(lexeme)
        ]

    def _tag(self, mark: Mark) -> list[Piece]:
        kind = self.kinds.get(mark.name)
        shown = self.shown(mark.shown)
        match self._state, kind:
            case "text", "open":
                self._state, self._raw = "outside", shown
            case "outside", "call":
                self._state, self._header = "name", ""
            case "body", "key":
                self._state, self._header = "key", ""
            case "value", "end of key" if not self.in_string:
                self._state = "body"
                return self._writer.close() if self._writer else []
            case "body", "end of call":
                return self._end_call()
            case (("outside" | "body" | "value"), "close"):
                return self._leave(shown)
            case _:
                return self._take(mark.shown)
        return []

    def _take(self, text: str) -> list[Piece]:
        if not text:
            return []
        match self._state:
            case "text":
                return self.say(self.shown(text))
            case "value" if self._writer is not None:
                return self._writer.text(self.shown(text))
            case "outside" if self._raw is not None:
                self._raw += self.shown(text)
            case "name" | "key":
                return self._take_header(text)
        return []

    def _take_header(self, text: str) -> list[Piece]:
        self._header += self.shown(text)
        head, found, rest = self._header.partition(">")
        if not found:
            return []
        if self._state == "name":
            self._state, self._raw = "body", None
            name = self.read_name(head)
            self._writer = ArgumentWriter(self, self.tool(name), trims=self.trims)
            return [self.begin_call(name), *self._take(rest)]
        self._state = "value"
        opened = self._writer.open(*self.read_key(head)) if self._writer else []
        return [*opened, *self._take(rest)]

    def _end_call(self) -> list[Piece]:
        writer, self._writer = self._writer, None
        self._state = "outside"
        return writer.end() if writer is not None else []

    def _leave(self, shown: str) -> list[Piece]:
        """End the calls; without any, their text is text for the user."""
        state, raw = self._state, self._raw
        if state == "text":
            return self.say(shown)
        closed = self._writer.close() if state == "value" and self._writer else []
        pieces = [*closed, *self._end_call()]
        self._state, self._raw = "text", None
        if raw is not None:
            return self.say(raw + (self._header if state == "name" else "") + shown)
        self.section()
        return pieces


class QwenTagParser(TagParser):
    """Read ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``."""

    kinds = {  # noqa: RUF012 - a constant of the dialect
        OPEN: "open",
        CLOSE: "close",
        "<function=": "call",
        "</function>": "end of call",
        "<parameter=": "key",
        "</parameter>": "end of key",
    }
    trims = True


class DsmlParser(TagParser):
    """Read DSML: ``<｜DSML｜invoke name="NAME">`` with parameters, between tags of function calls."""

    kinds = {  # noqa: RUF012 - a constant of the dialect
        f"<{_PLACE}function_calls>": "open",
        f"</{_PLACE}function_calls>": "close",
        f"<{_PLACE}tool_calls>": "open",
        f"</{_PLACE}tool_calls>": "close",
        f'<{_PLACE}invoke name="': "call",
        f"</{_PLACE}invoke>": "end of call",
        f'<{_PLACE}parameter name="': "key",
        f"</{_PLACE}parameter>": "end of key",
    }

    def on_mark(self, mark: Mark) -> list[Piece]:
        """Put a letter in the mark's place: it is a part of each tag."""
        if mark.name != DSML or not self.options.calls:
            return super().on_mark(mark)
        return super().on_text(_PLACE)

    def on_text(self, text: str) -> list[Piece]:
        """Find the tags in a text."""
        return super().on_text(text.replace(_PLACE, "\ufffd"))

    def shown(self, text: str) -> str:
        """Return a tag or a text as the user would see it."""
        return text.replace(_PLACE, DSML)

    def read_name(self, header: str) -> str:
        """Return the name of a call, without its quotation mark."""
        return header.strip().removesuffix('"')

    def read_key(self, header: str) -> tuple[str, bool | None]:
        """Return the name of a parameter, and whether its attribute says that the value is text."""
        found = _ATTRIBUTE.match(header)
        if found is None:
            return header, None
        return found[1], None if found[2] is None else found[2] == "true"


def write_qwen_grammar(rules: CallRules) -> str:
    """Return the grammar of forced calls in Qwen's tags."""
    calls, extra = [], []
    # A mark that is a token is no text.
    tags = ["</parameter>", *(() if CLOSE in rules.tokens else (CLOSE,))]
    for index, tool in enumerate(rules.tools):
        parts = [rules.mark(OPEN), rules.text(f"\n<function={tool.name}>\n")]
        for place, (key, schema, required) in enumerate(rules.parameters(tool)):
            name = f"value_{index}_{place}"
            if ">" in key or key.strip() != key:
                rules.refuse_always(tool, "a parameter with > or outer white space in its name")
            extra.append(f"{name}: {rules.text(f'<parameter={key}>' + chr(10))} {name}_text")
            extra += _value(rules, tool, f"{name}_text", schema, end="\n</parameter>\n", tags=tags)
            parts.append(name if required else f"{name}?")
        calls.append(" ".join([*parts, rules.text("</function>\n"), rules.mark(CLOSE)]))
    return rules.grammar(calls, between=rules.text("\n"), extra=extra)


def write_dsml_grammar(rules: CallRules) -> str:
    """Return the grammar of forced calls in DSML."""
    mark, calls, extra = rules.mark(DSML), [], []
    # A mark that is a token is no text.
    tags = [] if DSML in rules.tokens else [f"</{DSML}{name}>" for name in _DSML_ENDS]
    for index, tool in enumerate(rules.tools):
        parts = [rules.text("<"), mark, rules.text(f'invoke name="{tool.name}">\n')]
        for place, (key, schema, required) in enumerate(rules.parameters(tool)):
            name = f"value_{index}_{place}"
            if ">" in key or '"' in key:
                rules.refuse_always(tool, "a parameter with > or a quotation mark in its name")
            is_text = _types(schema) == {"string"}
            attributes = f'parameter name="{key}" string="{"true" if is_text else "false"}">'
            extra.append(f"{name}: {rules.text('<')} {mark} {rules.text(attributes)} {name}_text")
            closing = f"{mark} {rules.text('parameter>' + chr(10))}"
            extra += _value(
                rules, tool, f"{name}_text", schema, end="</", after=closing, tags=tags, marked=True
            )
            parts.append(name if required else f"{name}?")
        calls.append(" ".join([*parts, rules.text("</"), mark, rules.text("invoke>\n")]))
    opening = f"{rules.text('<')} {mark} {rules.text('function_calls>' + chr(10))}"
    closing = f"{rules.text('</')} {mark} {rules.text('function_calls>')}"
    return rules.grammar(calls, before=opening, after=closing, extra=extra)


def _value(
    rules: CallRules,
    tool: Tool,
    name: str,
    schema: Mapping[str, Any],
    *,
    end: str,
    after: str = "",
    tags: Sequence[str] = (),
    marked: bool = False,
) -> list[str]:
    """Return the rules of a value and its end. Text is free up to ``end``; an enumeration is exact.

    With ``marked``, an attribute of the value tells the parser whether it is text.
    Where the parser ends a value at one of ``tags``, the text cannot contain it.
    """
    types = _types(schema)
    _check_tags(rules, tool, schema, tags)
    # The parser of Qwen's tags reads any text where a text is allowed; DSML says which it is.
    if types != {"string"} and (marked or "string" not in types):
        return [f"{name}: {rules.json(schema, strict=tool.strict)} {rules.text(end)} {after}"]
    choices = schema.get("enum")
    texts = [
        rules.text("null" if one is None else one)
        for one in (choices if isinstance(choices, list) else ())
        if isinstance(one, str) or (one is None and "null" in types)
    ]
    _check_text(rules, tool, schema, has_texts=bool(texts))
    if texts:
        _check_nulls(rules, tool, schema)
        return [f"{name}: ({' | '.join(texts)}) {rules.text(end)} {after}"]
    # DSML's text ends where a tag would begin.
    kept_out = () if marked else tags
    return [f"{name}: {name}_free {after}", f"{name}_free[suffix={rules.text(end)}]: {_free(kept_out)}"]


def _check_tags(rules: CallRules, tool: Tool, schema: Mapping[str, Any], tags: Sequence[str]) -> None:
    """Raise `RequestError` for a text of an enumeration, plain or in JSON, that the parser would cut."""
    choices = schema.get("enum")
    texts = [one for one in (choices if isinstance(choices, list) else ()) if isinstance(one, str)]
    if any(tag in one for one in texts for tag in tags):
        rules.refuse_always(tool, "an enum with a value that holds one of the format's own tags")


def _check_nulls(rules: CallRules, tool: Tool, schema: Mapping[str, Any]) -> None:
    """Raise `RequestError` for a text of an enumeration that the parser would read as null."""
    choices = [one for one in schema["enum"] if isinstance(one, str)]
    if (
        "null" in _types(schema)
        and None not in schema["enum"]
        and any(one.strip() in _NULLS for one in choices)
    ):
        rules.refuse_always(tool, "an enum with the text null where null is allowed too")


def _check_text(rules: CallRules, tool: Tool, schema: Mapping[str, Any], *, has_texts: bool) -> None:
    """Raise `RequestError` if a tool is strict and free text, or one of an enumeration, may be invalid."""
    choices = schema.get("anyOf")
    unites = isinstance(choices, list) and not has_texts and "type" not in schema
    rules.check(tool, schema, (*DEFINITIONS, *(["enum"] if has_texts else ["anyOf"] if unites else [])))
    for choice in choices if unites and isinstance(choices, list) else ():
        if isinstance(choice, Mapping) and "string" in _types(choice):
            _check_text(rules, tool, choice, has_texts=False)


def _free(tags: Sequence[str]) -> str:
    """Return the expression of any text without ``tags``."""
    text = r"(.|\n)*"
    names = "|".join(re.escape(tag).replace("/", r"\/") for tag in tags)
    return f"/{text}/ & ~/{text}({names}){text}/" if tags else f"/{text}/"
