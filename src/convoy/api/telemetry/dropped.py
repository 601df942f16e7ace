"""Count the blocks and items of replayed conversations that this server does not know."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator

from convoy.cluster.metrics.families import Metric, counter

# Types that have a row of their own. A client chooses the others, so they share one.
_KNOWN = frozenset({"redacted_thinking", "compaction", "server_tool_use", "mcp_tool_use", "search_result"})
_RESULT = "_tool_result"


class DroppedHistory:
    """Count dropped blocks by API and type. Several threads use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    def count(self, api: str, kinds: Iterable[str]) -> None:
        """Count one block of ``api`` for each type in ``kinds``."""
        with self._lock:
            self._counts.update((api, _row(kind)) for kind in kinds)

    def families(self) -> Iterator[Metric]:
        """Yield the counts so far."""
        with self._lock:
            counts = sorted(self._counts.items())
        values = [({"api": api, "type": kind}, n) for (api, kind), n in counts]
        yield counter("convoy_http_dropped_blocks", "Blocks of replayed history that were left out.", values)


def _row(kind: str) -> str:
    if kind in _KNOWN:
        return kind
    return _RESULT.lstrip("_") if kind.endswith(_RESULT) else "other"
