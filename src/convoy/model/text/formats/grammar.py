"""Write the grammars of forced calls, in llguidance's form of Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from convoy.model.text.conversation import Tool

_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class CallRules:
    """Hold what a grammar of calls needs: the tools that may be called, and the ids of the marks."""

    tools: tuple[Tool, ...]
    # Whether several calls may follow one another.
    parallel: bool
    # The end mark of the reasoning in which the reply begins, or "".
    reasoning_end: str
    tokens: Mapping[str, int]

    def mark(self, name: str) -> str:
        """Return the expression of a mark: its token where it is one, otherwise its text."""
        number = self.tokens.get(name)
        return self.text(name) if number is None else f"<[{number}]>"

    def text(self, text: str) -> str:
        """Return the expression of a text."""
        return json.dumps(text)

    def schema(self, tool: Tool) -> str:
        """Return the expression of the arguments of a tool."""
        return self.json(tool.parameters or _ANY_OBJECT, strict=tool.strict)

    def json(self, schema: Any, *, strict: bool) -> str:
        """Return the expression of a JSON value; a lenient one passes over keywords that cannot be kept."""
        if isinstance(schema, Mapping) and not strict:
            schema = {**schema, "x-guidance": {"lenient": True}}
        return "%json " + json.dumps(schema)

    def grammar(self, calls: Sequence[str], *, before: str = "", between: str = "", after: str = "") -> str:
        """Return a grammar of one or more of ``calls``, behind the reasoning that the prompt has opened."""
        lines = [f"call: {' | '.join(f'call_{index}' for index in range(len(calls)))}"]
        lines += [f"call_{index}: {call}" for index, call in enumerate(calls)]
        more = f"({between} call)*" if self.parallel else ""
        start = f"{before} call {more} {after}"
        if self.reasoning_end:
            start = f"reasoning {start}"
            end = self.tokens.get(self.reasoning_end)
            if end is None:
                lines.append(f"reasoning[suffix={json.dumps(self.reasoning_end)}]: /(.|\\n)*/")
            else:
                lines += [f"reasoning: FREE <[{end}]>", "FREE: /(.|\\n)*/"]
        return "\n".join([f"start: {start}", *lines])


def json_call(rules: CallRules, tool: Tool, arguments: str) -> str:
    """Return the expression of ``{"name": NAME, arguments: {...}}``."""
    opening = rules.text(f'{{"name": {json.dumps(tool.name)}, "{arguments}": ')
    return f"{opening} {rules.schema(tool)} {rules.text('}')}"
