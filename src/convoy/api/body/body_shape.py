"""Bound the number of lists, objects and fields in a JSON body before any of them is built.

Every two bytes of a body may be an empty list. That list takes thirty times as much memory, and a few million
of them hold the interpreter lock for a second. A field takes as long, because its name is text of its own.
"""

from __future__ import annotations

import re

from convoy.errors import RequestError

MAX_PARTS = 100_000
# Lists and objects within one another, in arguments, schemas and template variables.
MAX_DEPTH = 64
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


def check_shape(data: bytes) -> None:
    """Raise RequestError if JSON holds more than `MAX_PARTS` lists, objects and fields."""
    if _parts(data, 0, len(data)) <= MAX_PARTS:
        return
    # The quick count was too high. Count again without the brackets and colons inside strings.
    count = position = 0
    for string in _STRING.finditer(data):
        count += _parts(data, position, string.start())
        if count > MAX_PARTS:
            break
        position = string.end()
    else:
        count += _parts(data, position, len(data))
    if count > MAX_PARTS:
        raise RequestError(
            f"the body holds more than {MAX_PARTS} lists, objects and fields", code="body_too_complex"
        )


def check_depth(value: object, param: str) -> None:
    """Raise RequestError if the lists and objects of ``value`` lie deeper in one another than `MAX_DEPTH`."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for one in level
            if isinstance(one, dict | list)
            for item in (one.values() if isinstance(one, dict) else one)
        ]
    if level:
        raise RequestError(f"{param} is nested more than {MAX_DEPTH} levels deep", param=param)


def _parts(data: bytes, start: int, end: int) -> int:
    return data.count(b"[", start, end) + data.count(b"{", start, end) + data.count(b":", start, end)
