"""A bound on how many lists, objects and fields a JSON body holds, checked before they are made.

Every two bytes of a body may be an empty list, which takes thirty times as much memory, and a second of the
interpreter lock for a few million of them. A field takes as long, since its name is text of its own.
"""

from __future__ import annotations

import re

from convoy.errors import RequestError

MAX_PARTS = 100_000
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


def check_shape(data: bytes) -> None:
    """Raise RequestError where JSON holds more than `MAX_PARTS` lists, objects and fields."""
    if _parts(data, 0, len(data)) <= MAX_PARTS:
        return
    # Brackets and colons in text do not count.
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


def _parts(data: bytes, start: int, end: int) -> int:
    return data.count(b"[", start, end) + data.count(b"{", start, end) + data.count(b":", start, end)
