"""Find the member at fault when the stages fail again and again although every member is connected."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from convoy.cluster.presence.backoff import Backoff


def find_holder(members: Sequence[str], reached: Mapping[str, int], step: int) -> str | None:
    """Return the member that holds ``step`` up, or None if every member has forwarded it.

    ``members`` are in the ring's order. ``reached`` maps each member to the newest step that it forwarded;
    silent members are missing.

    A silent member is blocked on a full inbox: because of itself, or because its successor takes nothing.
    Of several silent neighbours the last one is therefore the holder, unless a member behind them has
    already forwarded the step: then the step must have passed through them.
    """
    held: str | None = None
    for member in members:
        if member not in reached:
            held = member
        # This member answers and has not forwarded the step. A silent one before it is the holder instead.
        elif reached[member] < step:
            return held or member
        else:
            held = None
    return held


# Failures of one member: a link may fail once, and a replay once more.
_MAX_FAILURES = 2
# After so long without a failure, the next failure starts a new count.
_CALM_S = 60.0


class FaultTracker:
    """Count failures by member. If a failure may be the fault of either of two members, count it for both."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._failures: Counter[str] = Counter()
        self._calm_since_s = now()
        self._backoff = Backoff()

    def note(self, suspects: Sequence[str]) -> list[str]:
        """Count one more failure against all of ``suspects``, and return those that have failed too often.

        ``suspects`` lists the accused before the accuser. The result has the likeliest first: the member
        with the most failures, and of equals the accused. So an accuser that lies costs one good member
        at most. Then it has the most failures itself.
        """
        if self._now() - self._calm_since_s > _CALM_S:
            self.forget()
        self._calm_since_s = self._now()
        self._failures.update(suspects)
        often = [name for name in suspects if self._failures[name] > _MAX_FAILURES]
        return sorted(often, key=lambda name: -self._failures[name])

    def recovered(self) -> None:
        """Note that the stages run again. The calm time counts from now on."""
        self._calm_since_s = self._now()

    def wait_s(self) -> float:
        """Return the seconds to wait before the next try, if no member is to be left out."""
        return self._backoff.next_s()

    def forget(self) -> None:
        """Clear the counts, because the failure had another reason or the calm time has passed."""
        self._failures.clear()
        self._backoff = Backoff()
