"""Identify callers by their API keys, and read the key file again when it changes."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from convoy.api.keys.key_file import (
    BARE,
    MAX_KEY_CHARS,
    ApiKey,
    check_key,
    digest_of,
    new_key,
    parse_keys,
    read_key_file,
)
from convoy.api.keys.key_use import NO_LIMITS, KeyUse
from convoy.api.refusals import Unauthenticated, WrongKey
from convoy.cluster.metrics.families import Metric, counter, gauge
from convoy.errors import ConfigError

_log = logging.getLogger(__name__)
_LOOK_EVERY_S = 1.0
# How many keys that left the file keep their use.
_MAX_GONE = 10_000


@dataclass(frozen=True, slots=True)
class Caller:
    """Identify the sender of a request. ``name`` is its key's, and empty if the server asks for no key."""

    name: str
    use: KeyUse
    salt: bytes = field(default=b"", repr=False)
    metrics: bool = True


def anyone() -> Caller:
    """Return the caller of a server that asks for no key."""
    return Caller("", KeyUse(NO_LIMITS))


def key_of(headers: Mapping[str, str]) -> str:
    """Return the key that a request carries, as a bearer token or as x-api-key. Raises `Unauthenticated`.

    Names in ``headers`` are in lower case, or their case does not count.
    """
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    other = headers.get("x-api-key", "").strip()
    if bearer and other and not hmac.compare_digest(bearer.encode(), other.encode()):
        raise Unauthenticated("two different api keys were sent", hint="send one of them")
    if not (bearer or other):
        raise Unauthenticated("no api key was sent", hint='send the header "Authorization: Bearer KEY"')
    return bearer or other


class KeyRing:
    """Hold all keys of a server. Several threads may use it."""

    def __init__(
        self,
        keys: Sequence[ApiKey],
        *,
        file: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        max_gone: int = _MAX_GONE,
    ) -> None:
        self._file = file
        self._clock = clock
        self._now = now
        self._max_gone = max_gone
        self._lock = threading.Lock()
        self._own: list[ApiKey] = []
        self._uses: dict[str, KeyUse] = {}
        self._keys: dict[bytes, tuple[ApiKey, Caller]] = {}
        self._seen: object = None
        self._looked_s = clock()
        self._set(keys)

    @classmethod
    def of(cls, key: str) -> KeyRing:
        """Return a ring of one key. Raises `ConfigError` for a key that is too short or not sendable."""
        return cls([_bare_key(key)])

    @classmethod
    def open(
        cls,
        file: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        max_gone: int = _MAX_GONE,
    ) -> KeyRing:
        """Return the keys of a file, which is read again when it changes. Raises `ConfigError`."""
        seen = _signature(file)
        ring = cls(parse_keys(read_key_file(file), file), file=file, clock=clock, now=now, max_gone=max_gone)
        ring._seen = seen
        return ring

    @property
    def file(self) -> Path | None:
        """Return the file that is read again when it changes, or None. A pipe is none."""
        return None if self._seen is None else self._file

    def listed(self) -> tuple[ApiKey, ...]:
        """Return the keys that callers have, without their texts."""
        return tuple(replace(key, text=None) for key, _ in self._keys.values())

    @property
    def counted(self) -> frozenset[str]:
        """Return the names of the keys with counts, those that left the file included."""
        return frozenset(self._uses)

    def find(self, text: str) -> Caller:
        """Return the caller that ``text`` belongs to. Raises `WrongKey`."""
        self._look()
        # One character more than a key can have: a longer text never matches, and costs no more to hash.
        digest = digest_of(text[: MAX_KEY_CHARS + 1])
        key, caller = self._keys.get(digest, (None, None))
        if key is None or caller is None or not hmac.compare_digest(key.digest, digest):
            raise WrongKey("the api key is not right")
        if key.expires_s is not None and self._now() >= key.expires_s:
            raise WrongKey("the api key has expired", hint="ask for a new one")
        return caller

    def own_key(self, name: str) -> str:
        """Return a new key for a part of this process, under a name that no file can have."""
        text = new_key()
        self.add_own(name, text)
        return text

    def add_own(self, name: str, text: str) -> None:
        """Add the key ``text`` for a part of Convoy, under a name that no file can have."""
        with self._lock:
            self._own.append(ApiKey(f"({name})", digest_of(text)))
            self._set([key for key, _ in self._keys.values() if not key.name.startswith("(")])

    def reload(self) -> None:
        """Read the file again now. A file that cannot be used changes nothing and is logged."""
        if self._file is not None:
            with self._lock:
                self._read(self._file)

    def _look(self) -> None:
        if self._file is None or self._clock() - self._looked_s < _LOOK_EVERY_S:
            return
        with self._lock:
            self._looked_s = self._clock()
            if _signature(self._file) != self._seen:
                self._read(self._file)

    def _read(self, file: Path) -> None:
        self._seen = _signature(file)
        try:
            keys = parse_keys(read_key_file(file), file)
        except ConfigError as error:
            _log.warning("the keys stay as they were: %s", error.message)
            return
        self._set(keys)
        _log.info("keys read again file=%s keys=%d", file, len(keys))

    def _set(self, keys: Sequence[ApiKey]) -> None:
        made: dict[bytes, tuple[ApiKey, Caller]] = {}
        for key in (*keys, *self._own):
            use = self._uses.setdefault(key.name, KeyUse(key.limits, clock=self._clock))
            use.limits = key.limits
            made[key.digest] = (key, Caller(key.name, use, _salt(key), key.metrics or not key.is_named))
        names = {key.name for key, _ in made.values()}
        self._keys = made
        # A key that returns under its name continues from its old counts, so that removing and adding it
        # cannot reset a spend limit.
        gone = [name for name in self._uses if name not in names]
        used = [name for name in gone if self._uses[name].requests]
        for name in set(gone) - set(used[max(0, len(used) - self._max_gone) :]):
            del self._uses[name]

    def families(self, caller: Caller) -> Iterator[Metric]:
        """Yield the use of each key. ``caller`` sees the use of others only if its key may."""
        found = {one.name: one.use for _, one in self._keys.values()}
        uses = [(name, use) for name, use in sorted(found.items()) if caller.metrics or name == caller.name]
        yield counter(
            "convoy_key_requests",
            "Requests of a key that were admitted.",
            [({"key": n}, u.requests) for n, u in uses],
        )
        tokens = [
            ({"key": name, "kind": kind}, getattr(use, f"{kind}_tokens"))
            for name, use in uses
            for kind in ("prompt", "cached", "completion")
        ]
        yield counter("convoy_key_tokens", "Tokens of a key; cached ones are a part of the prompts'.", tokens)
        refused = [
            ({"key": name, "limit": limit}, number)
            for name, use in uses
            for limit, number in sorted(use.refusals.items())
        ]
        yield counter("convoy_key_refusals", "Requests of a key that a limit refused.", refused)
        yield gauge(
            "convoy_key_running", "Requests of a key that run.", [({"key": n}, u.running) for n, u in uses]
        )


def _bare_key(key: str) -> ApiKey:
    return ApiKey(BARE, digest_of(check_key(key, "the api key")), is_named=False)


def _salt(key: ApiKey) -> bytes:
    """Return the salt that keeps the cached prefixes of keys apart.

    It stays the same if a named key gets a new secret.
    """
    own = key.name.encode() if key.is_named else key.digest
    return hashlib.sha256(b"convoy api key " + own).digest()


def _signature(file: Path) -> object:
    try:
        found = os.stat(file)
    except OSError as error:
        return error.errno
    if not stat.S_ISREG(found.st_mode):
        # A pipe cannot be read a second time.
        return None
    return (
        found.st_dev,
        found.st_ino,
        found.st_size,
        found.st_mtime_ns,
        found.st_mode,
        found.st_uid,
        found.st_gid,
    )
