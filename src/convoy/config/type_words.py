"""Tell errors of `msgspec` about the types of values in words for people.

It is apart because files of settings and bodies of HTTP requests share it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# For files of settings.
TOML_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
    "null": "nothing",
}
_PATH = re.compile(r" - at `(?:key in )?\$?\.?(.*?)`$")
_TYPES = re.compile(r"`([^`]+)`")


def in_words(text: str, kinds: Mapping[str, str]) -> tuple[str, str | None]:
    """Return msgspec's error in words, and its field: ('expected an integer, got text', 'max_tokens').

    ``kinds`` has the word for each of msgspec's types.
    """
    found = _PATH.search(text)
    param = found.group(1).replace("[...]", "") if found else None
    plain = text[: found.start()] if found else text
    missing = re.fullmatch(r"Object missing required field `(.*)`", plain)
    if missing:
        name = missing.group(1)
        return "it is missing", f"{param}.{name}" if param else name

    def words(match: re.Match[str]) -> str:
        named = [kind for kind in match.group(1).split(" | ") if kind != "null"] or ["null"]
        return " or ".join(kinds.get(kind, kind) for kind in named)

    plain = _TYPES.sub(words, plain)
    # "JSON is malformed" keeps its capitals.
    return plain if plain[1:2].isupper() else plain[:1].lower() + plain[1:], param or None
