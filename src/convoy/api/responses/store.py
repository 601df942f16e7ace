"""Keep responses in memory, each for the key that made it."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from convoy.api.refusals import UnknownResponse
from convoy.config.type_resolution import resolved
from convoy.model.text.conversation import Turn

MAX_STORE_BYTES = 64 * 1024 * 1024
MAX_STORE_AGE_S = 3600.0
RESPONSE_PREFIX = "resp_"
# For the entry itself, its id, its owner and its place in the table.
_ENTRY_BYTES = 1024


def item_id(response_id: str, prefix: str, index: int) -> str:
    """Return the id of the output's item at ``index``, which names the response too."""
    return f"{prefix}{response_id.removeprefix(RESPONSE_PREFIX)}_{index}"


def response_of(item: str) -> str:
    """Return the id of the response that an item's id names."""
    return RESPONSE_PREFIX + item.partition("_")[2].partition("_")[0]


@dataclass(frozen=True, slots=True)
class _Entry:
    key: bytes
    owner: bytes
    # The response object as JSON.
    body: bytes
    # The conversation up to and with the answer, as JSON.
    turns: bytes
    kept_s: float

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.turns) + _ENTRY_BYTES


class ResponseStore:
    """Hold the latest responses of all keys within bounds of bytes and age. Several threads may use it.

    An entry belongs to an owner, which alone may read it, and counts for a key. A key may have many owners.
    When the store is full, the key with the most bytes loses its oldest response. So no key can push out the
    responses of another one that holds less.
    """

    def __init__(
        self,
        *,
        max_bytes: int = MAX_STORE_BYTES,
        max_age_s: float = MAX_STORE_AGE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._lock = threading.Lock()
        # Oldest first.
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        # The ids of each key, oldest first.
        self._ids_of: dict[bytes, OrderedDict[str, None]] = {}
        self._bytes_of: Counter[bytes] = Counter()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Return the bytes that all entries hold."""
        with self._lock:
            return self._num_bytes

    def keep(self, key: bytes, owner: bytes, response_id: str, body: bytes, turns: Sequence[Turn]) -> None:
        """Keep a response and its conversation for ``owner``. One over the store's size is not kept.

        ``key`` is the salt of the caller's key, whose share of the store it takes.
        """
        entry = _Entry(key, owner, body, msgspec.json.encode(turns), self._clock())
        if entry.num_bytes > self._max_bytes:
            return
        with self._lock:
            self._expire()
            self._entries[response_id] = entry
            self._ids_of.setdefault(key, OrderedDict())[response_id] = None
            self._bytes_of[key] += entry.num_bytes
            self._num_bytes += entry.num_bytes
            while self._num_bytes > self._max_bytes:
                largest = max(self._bytes_of, key=self._bytes_of.__getitem__)
                self._drop(next(iter(self._ids_of[largest])))

    def body(self, owner: bytes, response_id: str) -> bytes:
        """Return a response as JSON. Raises `UnknownResponse`, also for the response of another owner."""
        return self._find(owner, response_id).body

    def turns(self, owner: bytes, response_id: str) -> tuple[Turn, ...]:
        """Return a response's conversation. Raises `UnknownResponse` as `body` does."""
        return msgspec.json.decode(self._find(owner, response_id).turns, type=resolved(tuple[Turn, ...]))

    def output(self, owner: bytes, response_id: str) -> dict[str, dict[str, Any]]:
        """Return a response's items by their ids. Raises `UnknownResponse` as `body` does."""
        output = msgspec.json.decode(self.body(owner, response_id))["output"]
        return {item["id"]: item for item in output}

    def delete(self, owner: bytes, response_id: str) -> None:
        """Forget a response. Raises `UnknownResponse` as `body` does."""
        self._find(owner, response_id)
        with self._lock:
            self._drop(response_id)

    def _find(self, owner: bytes, response_id: str) -> _Entry:
        with self._lock:
            self._expire()
            entry = self._entries.get(response_id)
        # The answer is the same for an id that never was, so that nothing tells about another key's ids.
        if entry is None or entry.owner != owner:
            raise UnknownResponse("no response with this id is stored for this key")
        return entry

    def _expire(self) -> None:
        oldest_s = self._clock() - self._max_age_s
        while self._entries:
            response_id, entry = next(iter(self._entries.items()))
            if entry.kept_s > oldest_s:
                return
            self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        entry = self._entries.pop(response_id, None)
        if entry is None:
            return
        self._num_bytes -= entry.num_bytes
        self._bytes_of[entry.key] -= entry.num_bytes
        del self._ids_of[entry.key][response_id]
        if not self._ids_of[entry.key]:
            del self._ids_of[entry.key], self._bytes_of[entry.key]
