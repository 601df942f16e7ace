"""The ranks' agreement before their first operation: all must be there for the same plan."""

from __future__ import annotations

import queue
import threading
import time

from convoy.engine.ranks.sums.ring import Ring
from convoy.errors import CollectiveError, StepError
from convoy.wire.messages.ranks import Agree


class Agreement:
    """Collect each other rank's `Agree`, once. Any thread may call `put` and `fail`."""

    def __init__(self, ring: Ring) -> None:
        self._lock = threading.Lock()
        self._expected = ring.circulating()
        self._come: queue.SimpleQueue[tuple[int, Agree] | CollectiveError] = queue.SimpleQueue()

    @property
    def missing(self) -> list[int]:
        """Return the ranks that have sent nothing yet, neighbours first."""
        with self._lock:
            waited = sorted(self._expected, key=lambda pair: pair[0] != pair[1])
            return [origin for _, origin in waited]

    def put(self, sender: int, said: Agree) -> None:
        """Take an `Agree`.

        Raises `StepError` for a rank that this sender does not speak for, or for a second one.
        """
        with self._lock:
            if (sender, said.rank) not in self._expected:
                raise StepError(f"rank {sender} announced a plan for rank {said.rank}, unexpectedly or again")
            self._expected.remove((sender, said.rank))
        self._come.put((sender, said))

    def take(self, until_s: float) -> tuple[int, Agree]:
        """Return the next `Agree` and the rank that handed it over.

        Raises `queue.Empty` at ``until_s``, and the error given to `fail`.
        """
        item = self._come.get(timeout=max(0.0, until_s - time.monotonic()))
        if isinstance(item, CollectiveError):
            raise item
        return item

    def fail(self, error: CollectiveError) -> None:
        """Wake the waiting thread with ``error``."""
        self._come.put(error)


def check_agreement(mine: Agree, theirs: Agree) -> None:
    """Raise `CollectiveError` if the two differ, with the rank and both values of the first difference."""
    for name in ("plan_id", "world_size", "plan_digest", "dtype", "manifest"):
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
