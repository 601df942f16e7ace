"""Read the fields of a request that may reach an engine, each with its type.

Engines take fields that reach beyond an answer: addresses to fetch from, slots and priorities of other
requests, switches of their caches, templates that they run. No API's list has any of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec

from convoy.config.type_resolution import resolved
from convoy.errors import RequestError
from convoy.fleet.apis.api import Fields

# Characters of a name or an id.
_MAX_TEXT = 256
Int = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Short = Annotated[str, msgspec.Meta(max_length=_MAX_TEXT)]
Ids = Annotated[list[Int], msgspec.Meta(max_length=100_000)]
Words = Annotated[list[str], msgspec.Meta(max_length=1000)]

_AT = re.compile(r" - at `(?:key in )?\$?(.*?)`$")


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Be the base of the values inside a field."""


def read_field(name: str, raw: msgspec.Raw, kind: Any) -> Any:
    """Return a field's value as a type. Raises `RequestError` with the place at fault."""
    try:
        return msgspec.json.decode(raw, type=resolved(kind))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        found = _AT.search(str(error))
        where = name + (found.group(1).replace("[...]", "[]") if found else "")
        text = str(error)[: found.start()] if found else str(error)
        raise RequestError(
            f"{where}: {text}",
            param=where,
            code="unsupported_parameter",
            hint="a provider passes on text alone" if name in {"messages", "input"} else None,
        ) from None


def read_known(given: Fields, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a list, and leave out all others and null. Raises `RequestError`."""
    return {
        name: read_field(name, given[name], kind)
        for name, kind in known.items()
        if name in given and bytes(given[name]) != b"null"
    }


def check_references(schemas: Iterable[tuple[str, Any]]) -> None:
    """Check that no schema refers to anything outside itself, because engines may fetch that.

    ``schemas`` come with the field of each. Raises `RequestError`.
    """
    left = [*schemas]
    while left:
        name, found = left.pop()
        if isinstance(found, dict):
            for key in ("$ref", "$dynamicRef", "$recursiveRef"):
                reference = found.get(key)
                if isinstance(reference, str) and not reference.startswith("#"):
                    raise RequestError(f"{name}: a {key} that does not begin with '#'", param=name)
            left += [(name, one) for one in found.values()]
        elif isinstance(found, list):
            left += [(name, one) for one in found]
