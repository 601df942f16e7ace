"""Resolve the fields of a type before msgspec reads a value as that type."""

from __future__ import annotations

import threading
from typing import TypeVar

import msgspec

T = TypeVar("T")

_lock = threading.Lock()
_resolved: set[object] = set()


def resolved(kind: T) -> T:
    """Return ``kind``, the type of a value to decode, once msgspec knows the types of all its fields.

    msgspec evaluates the annotations of a class when the class is first used, and marks it as known before it
    is done. A second thread that uses the class meanwhile crashes the process (seen with msgspec 0.22). So
    one thread at a time resolves.
    """
    if kind not in _resolved:
        with _lock:
            if kind not in _resolved:
                msgspec.json.Decoder(kind)
                _resolved.add(kind)
    return kind
