"""What an engine asks for when a stage is lost, and gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from convoy.engine.continuation import SequenceOwner
from convoy.engine.run.executor import Executor
from convoy.engine.scheduler import SchedulerLimits
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


class RepeatedFailures:
    """Not thread-safe: the engine holds a lock."""

    def __init__(self) -> None:
        self._seen: dict[Sequence, _Failures] = {}

    @property
    def suspects(self) -> list[Sequence]:
        """Who failed more than once since its last token."""
        return [sequence for sequence, failures in self._seen.items() if failures.count > 1]

    def hopeless(
        self,
        live: Mapping[Sequence, SequenceOwner],
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


@dataclass(frozen=True, slots=True)
class NewStages:
    """Other stages, which know no sequence yet.

    ``relapse``: no member was lost, and yet the stages failed; so what was in flight may be why. Where it is
    known, ``failed_at`` is the member whose stage did; None also where it may have been one of two.
    ``same_bits``: they compute to the bit what those before them did.
    """

    executor: Executor
    limits: SchedulerLimits
    max_context: int
    relapse: bool = False
    failed_at: str | None = None
    same_bits: bool = True


class Replan(StageLost):
    """Nothing is lost, but nothing runs either, and there may be better stages now."""

    def __init__(self, why: str) -> None:
        super().__init__(why, public=why)


class Recovery(Protocol):
    """Finds other stages. Called on the engine's thread, without its lock."""

    def recover(self, error: StageLost) -> NewStages | None:
        """Other stages, or None where nothing was lost and the steps in flight may still come back.

        May take as long as members may be waited for. Raises `StageLost` where no stages were to be had in
        that time, and is asked again at once with it: then it does not answer without a pause. Any other
        `ConvoyError` is for good.
        """

    def state(self) -> str:
        """How far it is, in a few words, from any thread. Clients read them, so no peer has written any."""

    def cancel(self) -> None:
        """`recover` raises soon, now and from now on; from any thread."""
