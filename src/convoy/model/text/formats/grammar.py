"""Write the grammars of forced calls, in llguidance's form of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from convoy.errors import RequestError
from convoy.model.text.conversation import Tool
from convoy.model.text.grammar import MAX_GRAMMAR_BYTES, Grammar, without_anchors

_ANY_OBJECT = {"type": "object"}
# Without free white space a model cannot fill an answer with blanks.
_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

# Keywords that restrict no value, or only say where a schema stands.
_NOTES = frozenset(
    {"type", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
    | {"$comment", "$schema", "$id"}
)
_KEYWORD = re.compile(r"[$A-Za-z]{1,40}")
DEFINITIONS = ("$defs", "definitions")
OBJECT = ("properties", "required", "additionalProperties", *DEFINITIONS)


@dataclass(frozen=True, slots=True)
class CallRules:
    """Hold what a grammar of calls needs: the tools that may be called, and the ids of the marks."""

    tools: tuple[Tool, ...]
    # Whether several calls may follow one another.
    parallel: bool
    # The end mark of the reasoning in which the reply begins, or may begin, or "".
    reasoning_end: str
    tokens: Mapping[str, int]
    # The mark with which the reply itself may open a reasoning first, or "".
    reasoning_start: str = ""
    # Whether the prompt has opened the assistant's turn.
    opened: bool = True
    # The form of a text that may come in place of the calls.
    form: Grammar | None = None

    def mark(self, name: str) -> str:
        """Return the expression of a mark: its token where it is one, otherwise its text."""
        number = self.tokens.get(name)
        return self.text(name) if number is None else f"<[{number}]>"

    def text(self, text: str) -> str:
        """Return the expression of a text."""
        return json.dumps(text)

    def schema(self, tool: Tool) -> str:
        """Return the expression of the arguments of a tool: an object, also if its schema allows others."""
        return self.json({**tool.parameters, **_ANY_OBJECT}, strict=tool.strict)

    def json(self, schema: Any, *, strict: bool) -> str:
        """Return the expression of a JSON value; a lenient one passes over keywords that cannot be kept."""
        if isinstance(schema, Mapping):
            # Options of the compiler are the server's.
            schema = {**schema, "x-guidance": {**_JSON, "lenient": not strict}}
        return "%json " + json.dumps(schema)

    def check(self, tool: Tool, schema: Mapping[str, Any], enforced: Iterable[str]) -> None:
        """Raise `RequestError` if a tool is strict and ``schema`` has a keyword that is not ``enforced``."""
        others = [name for name in schema if name not in _NOTES and name not in set(enforced)]
        if others:
            self.refuse(tool, others[0])

    def check_required(self, tool: Tool, schema: Mapping[str, Any]) -> None:
        """Raise `RequestError` if a tool is strict and a required member is none of the `members`."""
        needed, given = schema.get("required"), schema.get("properties")
        known = given if isinstance(given, Mapping) else {}
        if isinstance(needed, list) and any(not isinstance(one, str) or one not in known for one in needed):
            self.refuse(tool, "required")

    def refuse(self, tool: Tool, keyword: str) -> None:
        """Raise `RequestError` if a tool is strict, for a keyword that its format cannot enforce."""
        if tool.strict:
            shown = keyword if _KEYWORD.fullmatch(keyword) else "one that is unknown"
            raise RequestError(
                f"tools has a keyword that cannot be enforced in this model's format of calls: {shown}",
                param="tools",
                code="unsupported_schema",
                hint='leave it out, or set "strict" to false',
            )

    def refuse_always(self, tool: Tool, what: str) -> None:
        """Raise `RequestError` for a tool whose forced call the parser would not read back."""
        raise RequestError(
            f"tool {tool.name} has {what}, which this model's format of calls cannot write",
            param="tools",
            code="unsupported_schema",
            hint="change it, or leave the choice of tools to the model",
        )

    def members(self, schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], bool]]:
        """Return name and schema of each property, and whether it is required."""
        properties, required = schema.get("properties"), schema.get("required")
        names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        return [
            (key, value if isinstance(value, Mapping) else {}, key in names)
            for key, value in (properties.items() if isinstance(properties, Mapping) else ())
        ]

    def parameters(self, tool: Tool) -> list[tuple[str, Mapping[str, Any], bool]]:
        """Return the `members` of a tool's parameters, each with the definitions that it may refer to.

        Raises `RequestError` if the copies of the definitions exceed the limit of a grammar, or if a strict
        tool cannot be enforced.
        """
        self.check(tool, tool.parameters, OBJECT)
        self.check_required(tool, tool.parameters)
        shared = {name: tool.parameters[name] for name in DEFINITIONS if name in tool.parameters}
        members = self.members(tool.parameters)
        refers = {key for key, value, _ in members if shared and '"$ref"' in json.dumps(value)}
        # Before they are written: the product of two parts of one body can be any number of bytes.
        num_bytes = len(refers) * len(json.dumps(shared))
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise RequestError(
                f"the definitions of tool {tool.name} take {num_bytes} bytes in its grammar, "
                f"and the limit is {MAX_GRAMMAR_BYTES}",
                param="tools",
                hint="refer to them in fewer parameters",
            )
        return [
            (key, {**value, **shared} if key in refers else value, needed) for key, value, needed in members
        ]

    def grammar(
        self,
        calls: Sequence[str],
        *,
        before: str = "",
        between: str = "",
        after: str = "",
        single: bool = False,
        extra: Sequence[str] = (),
        prelude: str | None = None,
    ) -> str:
        """Return a grammar of one or more of ``calls``, behind the reasoning that the prompt has opened.

        A ``single`` call is one at most. ``extra`` are rules that the calls name. A text of the `form` comes
        behind ``prelude``, as in `answer`.
        """
        lines = [f"call: {' | '.join(f'call_{index}' for index in range(len(calls)))}"]
        lines += [f"call_{index}: {call}" for index, call in enumerate(calls)]
        lines += extra
        more = f"({between} call)*" if self.parallel and not single else ""
        whole = f"{before} call {more} {after}"
        text = None if self.form is None else self._text(self.form, prelude)
        if text is None:
            return self._whole(whole, whole, lines)
        alone, behind, body = text
        return self._whole(f"{whole} | {alone}", f"({whole} | {behind})", [*lines, body])

    def answer(self, grammar: Grammar, *, prelude: str | None = None, extra: Sequence[str] = ()) -> Grammar:
        """Return a grammar behind the reasoning, or ``grammar`` itself if it is in a language of its own.

        A format's ``prelude`` stands between them, and otherwise newlines. ``extra`` are its rules.
        """
        text = self._text(grammar, prelude)
        if text is None:
            return grammar
        alone, behind, body = text
        return replace(grammar, kind="lark", text=self._whole(alone, behind, [body, *extra]))

    def _text(self, grammar: Grammar, prelude: str | None) -> tuple[str, str, str] | None:
        """Return the expressions of a text, alone and behind a reasoning, and the rule that they name.

        Return None for a grammar in a language of its own.
        """
        gap = r"/\n*/ " if prelude is None else ""
        behind = f"{prelude or ''} {gap}body"
        match grammar.kind:
            case "json_object":
                body = self.json(_ANY_OBJECT, strict=True)
            case "json_schema":
                body = self.json(_loaded(grammar.text), strict=grammar.strict)
            case "regex":
                pattern = f"(?:{_escaped(without_anchors(grammar.text))})"
                body = f"/{pattern}/"
                if gap:
                    # The newlines are a part of the expression, because it may begin with newlines itself.
                    behind = rf"/\n*{pattern}/"
            case "choice":
                choices = _loaded(grammar.text)
                body = " | ".join(
                    self.text(str(one)) for one in (choices if isinstance(choices, list) else [])
                )
            case _:
                return None
        return f"{prelude or ''} body", behind, f"body: {body}"

    def _whole(self, alone: str, behind: str, lines: list[str]) -> str:
        """Return the whole grammar of ``alone``, or of ``behind`` a reasoning if there is one."""
        if not self.reasoning_end:
            return "\n".join([f"start: {alone}", *lines])
        end = self.tokens.get(self.reasoning_end)
        if end is None:
            reasoning = [f"reasoning[suffix={self.text(self.reasoning_end)}]: /(.|\\n)*/"]
        else:
            reasoning = [f"reasoning: REASONING <[{end}]>", r"REASONING: /(.|\n)*/"]
        start = f"reasoning {behind}"
        if self.reasoning_start:
            start = f"{self.mark(self.reasoning_start)} {start} | {alone}"
        return "\n".join([f"start: {start}", *lines, *reasoning])


def _escaped(pattern: str) -> str:
    """Return a regular expression as it stands between two slashes on one line."""
    marks = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    return re.sub(r"\\.|/|\n", lambda found: marks.get(found[0], found[0]), pattern, flags=re.DOTALL)


def _loaded(text: str) -> Any:
    """Return a JSON value; malformed text is left to the compiler's check of the same text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"not": {}}


def json_calls(rules: CallRules, arguments: str, *, before: str = "", after: str = "") -> list[str]:
    """Return the expression of ``{"name": NAME, arguments: {...}}`` for each tool, between two others."""
    calls = []
    for tool in rules.tools:
        opening = rules.text(f'{{"name": {json.dumps(tool.name)}, "{arguments}": ')
        calls.append(f"{before} {opening} {rules.schema(tool)} {rules.text('}')} {after}")
    return calls
