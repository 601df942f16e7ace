"""Who is at fault when the stages fail again and again although every member is there."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from convoy.cluster.presence.backoff import Backoff


def find_holder(members: Sequence[str], reached: Mapping[str, int], step: int) -> str | None:
    """Of ``members`` in the ring's order, the one that keeps ``step``; None if all have passed it on.

    ``reached`` has the last step that each sent on. Who does not answer is held back with its inbox full: by
    itself, or because the next takes nothing and does not answer either. So of several in a row that do not
    answer it is the last; and one whose successor has passed the step on did so too.
    """
    held: str | None = None
    for member in members:
        if member not in reached:
            held = member
        elif reached[member] < step:
            return held or member
        else:
            held = None
    return held


_MAX_FAILURES = 2  # of one member: a wire may fail once, and a replay once more
_CALM_S = 60.0  # after so long without a failure, the next is a new one


class FaultTracker:
    """Failures by member, of one trouble; where it may have been either of two, both are counted."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._failures: Counter[str] = Counter()
        self._calm_since_s = now()
        self._backoff = Backoff()

    def note(self, blamed: Sequence[str]) -> list[str]:
        """One more failure, for which all of ``blamed`` come into question, the accused before the accuser.

        Returns those of them that have failed too often, the likeliest first: whom others doubted too, and of
        equals the accused. An accuser that lies costs one good member at most, then it is the likeliest.
        """
        if self._now() - self._calm_since_s > _CALM_S:
            self.forget()
        self._calm_since_s = self._now()
        self._failures.update(blamed)
        often = [name for name in blamed if self._failures[name] > _MAX_FAILURES]
        return sorted(often, key=lambda name: -self._failures[name])

    def recovered(self) -> None:
        """The stages run again; calm counts from now on."""
        self._calm_since_s = self._now()

    def wait_s(self) -> float:
        """How long to wait before the next try, if nobody is to be left out."""
        return self._backoff.next_s()

    def forget(self) -> None:
        """Something else happened, or nothing for long."""
        self._failures.clear()
        self._backoff = Backoff()
