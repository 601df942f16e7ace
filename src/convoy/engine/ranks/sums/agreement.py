"""What the ranks of a stage say before their first operation: it is for the same plan, or it is not begun."""

from __future__ import annotations

import queue
import threading
import time

from convoy.engine.ranks.sums.ring import Ring
from convoy.errors import CollectiveError, StepError
from convoy.wire.messages.ranks import Agree


class Agreement:
    """Each other rank's `Agree`, once. Any thread may call `put` and `fail`."""

    def __init__(self, ring: Ring) -> None:
        self._lock = threading.Lock()
        self._expected = ring.circulating()
        self._come: queue.SimpleQueue[tuple[int, Agree] | CollectiveError] = queue.SimpleQueue()

    @property
    def missing(self) -> list[int]:
        """Those that said nothing yet, neighbours first."""
        with self._lock:
            waited = sorted(self._expected, key=lambda pair: pair[0] != pair[1])
            return [origin for _, origin in waited]

    def put(self, sender: int, said: Agree) -> None:
        """Raises `StepError` for a rank that this sender does not speak for, or not again."""
        with self._lock:
            if (sender, said.rank) not in self._expected:
                raise StepError(f"rank {sender} said for rank {said.rank} what the collective is for")
            self._expected.remove((sender, said.rank))
        self._come.put((sender, said))

    def take(self, until_s: float) -> tuple[int, Agree]:
        """(who handed it over, what a rank said). Raises `queue.Empty` at that time, and what `fail` was
        given.
        """
        item = self._come.get(timeout=max(0.0, until_s - time.monotonic()))
        if isinstance(item, CollectiveError):
            raise item
        return item

    def fail(self, error: CollectiveError) -> None:
        """Wake whoever waits."""
        self._come.put(error)


def check_agreement(mine: Agree, theirs: Agree) -> None:
    """Raises `CollectiveError` naming the rank, and both values of the first thing that differs."""
    for name in ("generation", "world_size", "plan_digest", "dtype", "manifest"):
        own, other = getattr(mine, name), getattr(theirs, name)
        if own != other:
            raise CollectiveError(
                f"rank {theirs.rank} is here for {name.replace('_', ' ')} {_shown(other)}, "
                f"and rank {mine.rank} for {_shown(own)}",
                rank=theirs.rank,
                hint="all ranks of a stage need one plan, one model and one dtype",
            )


def _shown(value: object) -> str:
    text = value.hex() if isinstance(value, bytes) else str(value)
    return text[:16] or "none"
