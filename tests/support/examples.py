"""Take a third of the examples in `make test`, and all of them in `make test-long`."""

from __future__ import annotations

from hypothesis import settings


def examples(num: int) -> int:
    """Return how many of ``num`` examples to try: all, unless the profile is that of every run."""
    return -(-num // 3) if settings.get_current_profile_name() == "repeatable" else num
