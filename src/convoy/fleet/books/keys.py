"""API keys: 256 random bits that are shown once; the coordinator keeps a hash."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import asdict, dataclass

from convoy.api.keys.key_use import KeyLimits

_PREFIX = "convoy-"
_MAX_CHARS = 256  # of what a client sends as one
HINT_CHARS = 4


class Scope(enum.Enum):
    """What a key is for. None of them does another's work."""

    CONSUMER = "consumer"
    ADMIN = "admin"
    METRICS = "metrics"  # what whoever scrapes has: it reads counts, and can do nothing


@dataclass(frozen=True, slots=True)
class KeyTerms:
    """Until when a key is good, and how much it may use. None means: no limit.

    ``spend_limit_micro`` is of what its requests cost in all, those under way included.
    """

    expires_s: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    spend_limit_micro: int | None = None

    @property
    def limits(self) -> KeyLimits:
        """Its rates, as a server counts them."""
        return KeyLimits(self.requests_per_minute, self.tokens_per_minute, self.concurrent_requests)


NO_TERMS = KeyTerms()


@dataclass(frozen=True, slots=True)
class Grant:
    """What a key that was sent is good for. ``account`` is None for all but a consumer's."""

    account: str | None
    key_hash: bytes
    terms: KeyTerms

    @property
    def spends(self) -> bytes | None:
        """The key whose spend limit a charge counts against, None without one."""
        return None if self.terms.spend_limit_micro is None else self.key_hash


@dataclass(frozen=True, slots=True)
class KeyFacts:
    """A key as it is listed."""

    account: str | None
    scope: Scope
    label: str
    hint: str
    created_s: int
    revoked_s: int | None
    terms: KeyTerms = NO_TERMS
    spent_micro: int = 0


def hash_key(key: str) -> bytes:
    """SHA-256: with 256 random bits there is nothing to guess, so a slow hash would only cost time."""
    return hashlib.sha256(key[:_MAX_CHARS].encode()).digest()


def hint_of(key: str) -> str:
    """Enough of it to tell it from others."""
    return key.removeprefix(_PREFIX)[:HINT_CHARS]


def subject_of_key(
    key: str, scope: Scope, account: str | None, label: str, terms: KeyTerms = NO_TERMS
) -> dict[str, object]:
    """Return what an audit entry says of a new key: its hint, whose it is, and what it may use."""
    given = {name: value for name, value in asdict(terms).items() if value is not None}
    return {"hint": hint_of(key), "account": account, "scope": scope.value, "label": label, **given}
