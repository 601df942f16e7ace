"""The engine's request for other stages after a loss, the reply, and the count of repeated failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from convoy.engine.run.executor import Executor
from convoy.engine.scheduler import SchedulerLimits
from convoy.engine.sequence import Sequence, SequenceOwner
from convoy.errors import ConvoyError, StageLost

MAX_FAILURES = 8
MAX_MEMBERS = 2
# Failures at a member before it counts: a single one may be the fault of the member or of a wire.
_ENOUGH = 2


@dataclass(slots=True)
class _Failures:
    """Count the failures of a sequence since it has ``num_tokens``.

    ``at`` counts them by member, for failures where the sequence ran by itself.
    """

    num_tokens: int
    count: int = 0
    at: Counter[str] = field(default_factory=Counter)

    @property
    def members(self) -> list[str]:
        return sorted(member for member, count in self.at.items() if count >= _ENOUGH)


class RepeatedFailures:
    """Find the sequences that make stages fail again and again. Not thread-safe: the engine holds a lock."""

    def __init__(self) -> None:
        self._seen: dict[Sequence, _Failures] = {}

    @property
    def suspects(self) -> list[Sequence]:
        """Return the sequences that failed more than once since their last token."""
        return [sequence for sequence, failures in self._seen.items() if failures.count > 1]

    def hopeless(
        self,
        live: Mapping[Sequence, SequenceOwner],
        in_flight: Iterable[Sequence],
        error: StageLost,
        member: str | None,
    ) -> list[tuple[object, ConvoyError]]:
        """Return the groups to end after one more failure, each with its reason.

        ``member`` is the member where the stage failed, or None if unknown.
        """
        sequences = [sequence for sequence in dict.fromkeys(in_flight) if sequence in live]
        self._seen = {sequence: self._once_more(sequence) for sequence in sequences}
        if len(sequences) == 1 and member is not None:
            # Only a sequence that ran alone can be suspected of a failure at one member.
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
    """Hold the stages that replace lost ones; they know no sequence yet.

    With ``without_loss``, the stages failed although no member was lost, so a request in flight may be the
    cause.
    ``failed_at`` is the member of the failed stage; it is None if unknown, or if one of two may have failed.
    With ``same_bits``, they compute the same bits as the previous stages.
    """

    executor: Executor
    limits: SchedulerLimits
    max_context: int
    without_loss: bool = False
    failed_at: str | None = None
    same_bits: bool = True


@dataclass(frozen=True, slots=True)
class Replan:
    """Ask for new stages although nothing is lost: nothing runs, and there may be better stages now.

    ``why`` is the reason. Clients may read it.
    """

    why: str


class Recovery(Protocol):
    """Find other stages. The engine calls it on its own thread, without its lock."""

    def recover(self, error: StageLost) -> NewStages | None:
        """Return other stages, or None if nothing was lost and the steps in flight may still come back.

        The call may take as long as members may be waited for. Raises `StageLost` if no stages were found in
        that time; the engine then asks again at once with that error, and the next call pauses before it
        answers. Any other `ConvoyError` is final.
        """

    def replan(self, request: Replan) -> NewStages | None:
        """Return better stages, or None if there are none; the present ones go on then.

        Raises as `recover` does, once the present stages are given up.
        """

    def state(self) -> str:
        """Return the progress in a few words, from any thread.

        Clients read them, so no peer may write any.
        """

    def cancel(self) -> None:
        """Make `recover` raise soon, now and from now on; from any thread."""
