"""What runs whenever the stages fail although every member is there: a request that no stage can run.

Replayed for ever, it would hold up everybody, and cost one member after another. Who was in flight at one
failure after another, without a new token between, is ended; so is who failed by itself, again
and again, at two members. A sequence that gains a token, or was not in flight once, is innocent again. From
the second failure on such sequences are run one after another, so that none is ended for what ran beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from convoy.engine.continuation import Continuation
from convoy.engine.sequence import Sequence
from convoy.errors import ConvoyError, StageLost

MAX_FAILURES = 8
MAX_MEMBERS = 2
_ENOUGH = 2  # failures at a member: one alone may be the member's, or a wire's


@dataclass(slots=True)
class _Failures:
    """Of a sequence since it has ``num_tokens``; ``at`` counts them by member, where it ran by itself."""

    num_tokens: int
    count: int = 0
    at: Counter[str] = field(default_factory=Counter)

    @property
    def members(self) -> list[str]:
        return sorted(member for member, count in self.at.items() if count >= _ENOUGH)


class Relapses:
    """Not thread-safe: the engine holds a lock."""

    def __init__(self) -> None:
        self._seen: dict[Sequence, _Failures] = {}

    @property
    def suspects(self) -> list[Sequence]:
        """Who failed more than once since its last token."""
        return [sequence for sequence, failures in self._seen.items() if failures.count > 1]

    def hopeless(
        self,
        live: Mapping[Sequence, Continuation],
        in_flight: Iterable[Sequence],
        error: StageLost,
        member: str | None,
    ) -> list[tuple[object, ConvoyError]]:
        """The groups to end after one more failure, at ``member`` where that is known, and why."""
        sequences = [sequence for sequence in dict.fromkeys(in_flight) if sequence in live]
        self._seen = {sequence: self._once_more(sequence) for sequence in sequences}
        if len(sequences) == 1 and member is not None:
            self._seen[sequences[0]].at[member] += 1
        return [
            (live[sequence].group, _hopeless(failures, error))
            for sequence, failures in self._seen.items()
            if failures.count >= MAX_FAILURES or len(failures.members) >= MAX_MEMBERS
        ]

    def _once_more(self, sequence: Sequence) -> _Failures:
        failures = self._seen.get(sequence)
        if failures is None or failures.num_tokens != len(sequence.tokens):
            failures = _Failures(len(sequence.tokens))
        failures.count += 1
        return failures


def _hopeless(failures: _Failures, error: StageLost) -> StageLost:
    public = f"the stages failed at the request {failures.count} times in a row"
    if len(failures.members) >= MAX_MEMBERS:
        public += f", at {' and at '.join(failures.members)}"
    return StageLost(
        f"{public}: {error.message}", hint="the log of the member that failed says more", public=public
    )
