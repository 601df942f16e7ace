"""Order the knowledge about a member beyond its identity. A cluster has its weakest member's level."""

from __future__ import annotations

import enum
from collections.abc import Iterable


class Level(enum.IntEnum):
    """Order ``none < self_signed < hardware``: unproved, says itself what it runs, a measured machine."""

    NONE = 0
    SELF_SIGNED = 1
    HARDWARE = 2

    @property
    def text(self) -> str:
        """Return the word in policy files, status and messages."""
        return self.name.lower()

    @classmethod
    def from_text(cls, text: str) -> Level:
        """Return the level of a word. Raises `ValueError` for any other, which is never taken for a level."""
        for level in cls:
            if level.text == text:
                return level
        raise ValueError(f"there is no level {text[:63]!r}, expected {', '.join(one.text for one in cls)}")


def weakest(levels: Iterable[Level]) -> Level:
    """Return the level of a cluster: the lowest of its members', or none without members."""
    return min(levels, default=Level.NONE)
