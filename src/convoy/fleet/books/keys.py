"""Make and hash API keys: 256 random bits that are shown once. The coordinator keeps a hash."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import asdict, dataclass

from convoy.api.keys.key_use import KeyLimits

_PREFIX = "convoy-"
# The most characters that are read of a key as a client sends it.
_MAX_CHARS = 256
HINT_CHARS = 4


class Scope(enum.Enum):
    """Name the use of a key. No scope includes another."""

    CONSUMER = "consumer"
    ADMIN = "admin"
    # A scraper's key reads counts, and can do nothing else.
    METRICS = "metrics"


@dataclass(frozen=True, slots=True)
class KeyTerms:
    """Hold a key's expiry and limits. None means no limit.

    ``spend_limit_micro`` limits the total cost of its requests, those in flight included.
    """

    expires_s: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    spend_limit_micro: int | None = None

    @property
    def limits(self) -> KeyLimits:
        """Return the key's rates, as a server counts them."""
        return KeyLimits(self.requests_per_minute, self.tokens_per_minute, self.concurrent_requests)


NO_TERMS = KeyTerms()


@dataclass(frozen=True, slots=True)
class Grant:
    """Hold the rights of a key that was sent. ``account`` is None for every key but a consumer's."""

    account: str | None
    key_hash: bytes
    terms: KeyTerms

    @property
    def spends(self) -> bytes | None:
        """Return the hash of the key if it has a spend limit that charges count against, else None."""
        return None if self.terms.spend_limit_micro is None else self.key_hash


@dataclass(frozen=True, slots=True)
class KeyFacts:
    """Describe a key as it is listed."""

    account: str | None
    scope: Scope
    label: str
    hint: str
    created_s: int
    revoked_s: int | None
    terms: KeyTerms = NO_TERMS
    spent_micro: int = 0


def hash_key(key: str) -> bytes:
    """Return the SHA-256.

    With 256 random bits there is nothing to guess, so a slow hash would only cost time.
    """
    return hashlib.sha256(key[:_MAX_CHARS].encode()).digest()


def hint_of(key: str) -> str:
    """Return enough of the key to tell it from others."""
    return key.removeprefix(_PREFIX)[:HINT_CHARS]


def subject_of_key(
    key: str, scope: Scope, account: str | None, label: str, terms: KeyTerms = NO_TERMS
) -> dict[str, object]:
    """Return the facts of a new key for an audit entry: its hint, its account, and its limits."""
    given = {name: value for name, value in asdict(terms).items() if value is not None}
    return {"hint": hint_of(key), "account": account, "scope": scope.value, "label": label, **given}
