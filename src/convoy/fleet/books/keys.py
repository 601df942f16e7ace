"""API keys: 256 random bits that are shown once; the coordinator keeps a hash."""

from __future__ import annotations

import enum
import hashlib
import secrets
from dataclasses import dataclass

_PREFIX = "convoy-"
_KEY_BYTES = 32
_MAX_CHARS = 256  # of what a client sends as one
HINT_CHARS = 4


class Scope(enum.Enum):
    """What a key is for. None of them does another's work."""

    CONSUMER = "consumer"
    ADMIN = "admin"
    METRICS = "metrics"  # what whoever scrapes has: it reads counts, and can do nothing


@dataclass(frozen=True, slots=True)
class KeyFacts:
    """A key as it is listed."""

    account: str | None
    scope: Scope
    label: str
    hint: str
    created_s: int
    revoked_s: int | None


def new_key() -> str:
    """Shown to whoever asked for it, and never again."""
    return _PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def hash_key(key: str) -> bytes:
    """SHA-256: with 256 random bits there is nothing to guess, so a slow hash would only cost time."""
    return hashlib.sha256(key[:_MAX_CHARS].encode()).digest()


def hint_of(key: str) -> str:
    """Enough of it to tell it from others."""
    return key.removeprefix(_PREFIX)[:HINT_CHARS]
