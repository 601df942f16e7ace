"""Describe which texts an answer may have: a JSON schema, a regular expression, choices or a grammar."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

# Of the source text of one grammar.
MAX_GRAMMAR_BYTES = 256 * 1024

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark", "gbnf"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """Hold a grammar's source text. For "choice" it is a JSON list of texts, for "json_object" empty.

    ``strict`` refuses a JSON schema with a keyword that cannot be enforced. ``param`` names the request's
    field for errors. With ``has_flag`` the request can choose ``strict`` there.
    """

    kind: GrammarKind
    text: str = ""
    strict: bool = True
    param: str = "grammar"
    has_flag: bool = False


def without_anchors(pattern: str) -> str:
    """Return a regular expression without the anchors at its ends, because the whole text must match it."""
    pattern = pattern.removeprefix("^")
    unescaped = re.fullmatch(r"(?:[^\\]|\\.)*\$", pattern, re.DOTALL)
    return pattern[:-1] if unescaped else pattern
