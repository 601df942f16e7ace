"""How much is known of a member beyond its identity: an ordered scale. A cluster has its weakest member's."""

from __future__ import annotations

import enum
from collections.abc import Iterable


class Level(enum.IntEnum):
    """``none < self_signed < hardware``: unproved, says itself what it runs, a measured machine."""

    NONE = 0
    SELF_SIGNED = 1
    HARDWARE = 2

    @property
    def text(self) -> str:
        """The word in policy files, status and messages."""
        return self.name.lower()

    @classmethod
    def from_text(cls, text: str) -> Level:
        """The level of a word. Raises `ValueError` for any other, which is never taken for a level."""
        for level in cls:
            if level.text == text:
                return level
        raise ValueError(f"there is no level {text[:63]!r}, expected {', '.join(one.text for one in cls)}")


def weakest(levels: Iterable[Level]) -> Level:
    """The level of a cluster: the lowest of its members', none without any."""
    return min(levels, default=Level.NONE)
