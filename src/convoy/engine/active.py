"""The active sequences and their owners, those that fail again and again, and the work between steps.

An owner is told of the tokens, the end and the failures of its sequence.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from convoy.engine.requests.near_tie import NEAR_TIE
from convoy.engine.run.executor import Executor, Replan
from convoy.engine.scheduler import Scheduled, Scheduler
from convoy.engine.sequence import Sequence, SequenceOwner
from convoy.errors import ConvoyError, StageLost
from convoy.model.constraints.matcher import MaskFiller, Matcher
from convoy.model.sampling.output_rows import SampleJob, SampleResult
from convoy.wire.messages.control import Row

MAX_FAILURES = 8
MAX_MEMBERS = 2
# Failures at a member before it counts: a single one may be the fault of the member or of a wire.
_ENOUGH = 2

# The executor, the scheduler, and the lock to hold while the scheduler is looked at or changed. A result
# that is a `Replan` asks the engine for other stages.
Between = Callable[[Executor, Scheduler, threading.Condition], Any]


class PausedWork:
    """Queue work to run while no step is in flight, first come, first served.

    The engine's lock guards every method but `do_one`.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Between, Future[Any]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, work: Between) -> Future[Any]:
        """Queue ``work`` and return the future of its result; `refuse` may end it with an error instead."""
        future: Future[Any] = Future()
        self._waiting.append((work, future))
        return future

    def drop(self, future: Future[Any]) -> bool:
        """Remove the work of ``future`` from the queue; return False if it has begun already."""
        before = len(self._waiting)
        self._waiting = deque(one for one in self._waiting if one[1] is not future)
        return len(self._waiting) < before

    def do_one(self, executor: Executor, scheduler: Scheduler, lock: threading.Condition) -> Replan | None:
        """Run the first piece of work, and return the request for other stages that it returns, if any.

        Its caller gets the result or any error through the future. A lost stage or a bug is raised here too,
        so that the engine's loop recovers or stops.
        """
        with lock:
            if not self._waiting:
                return None
            work, future = self._waiting.popleft()
        try:
            result = work(executor, scheduler, lock)
            future.set_result(result)
            return result if isinstance(result, Replan) else None
        except BaseException as error:
            future.set_exception(error)
            if isinstance(error, StageLost) or not isinstance(error, ConvoyError):
                raise
            return None

    def refuse(self, error: ConvoyError) -> None:
        """End all waiting work with ``error``."""
        while self._waiting:
            self._waiting.popleft()[1].set_exception(error)


_log = logging.getLogger(__name__)


class ActiveSequences(Mapping[Sequence, SequenceOwner]):
    """Map each active sequence to its owner.

    Not thread-safe: the engine holds a lock. A sequence that leaves returns its blocks to ``scheduler``.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._owners: dict[Sequence, SequenceOwner] = {}
        self._masks = MaskFiller()
        self.num_near_ties = 0

    def __getitem__(self, sequence: Sequence) -> SequenceOwner:
        return self._owners[sequence]

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, owners: Iterable[SequenceOwner]) -> None:
        """Activate sequences that the scheduler has queued already."""
        self._owners.update((one.sequence, one) for one in owners)

    def sample_jobs(self, scheduled: Scheduled) -> list[SampleJob]:
        """Return one sampling job for each output of a step's rows, in row order."""
        self._masks.fill(_constrained(scheduled))
        parts = zip(scheduled.step.rows, scheduled.sequences, scheduled.drafts, strict=True)
        return [job for row, sequence, drafts in parts for job in self[sequence].sample_jobs(row, drafts)]

    def advance(self, scheduled: Scheduled, outcomes: tuple[SampleResult, ...]) -> int:
        """Pass a step's sampling results to the owners; return the number of generated tokens."""
        num_generated = offset = 0
        parts = zip(scheduled.step.rows, scheduled.sequences, scheduled.drafts, strict=True)
        number = scheduled.step.number
        for row, sequence, drafts in parts:
            of_row = outcomes[offset : offset + row.num_outputs]
            offset += row.num_outputs
            owner = self._owners.get(sequence)
            if owner is None or sequence.void_step == number:
                continue
            num_generated += self._advance(owner, row, drafts, of_row)
            if sequence.fed_step > number and not of_row[-1].feeds:
                self._scheduler.refuse_fed(sequence)
        return num_generated

    def mark_replayed_inexact(self, near_tie: float) -> None:
        """Mark sequences with generated tokens as replayed on stages that are not bit-exact.

        From now on, positions are logged whose two best tokens are closer than ``near_tie``.
        """
        spoken = [sequence for sequence in self._owners if sequence.num_generated]
        for sequence in spoken:
            sequence.near_tie = max(sequence.near_tie, near_tie, NEAR_TIE)
        if spoken:
            _log.warning(
                "%d running texts continue on stages that are not bit-exact with the previous ones",
                len(spoken),
            )

    def retire(self, owner: SequenceOwner) -> None:
        """Finish an active sequence."""
        self._scheduler.finish(owner.sequence)
        del self._owners[owner.sequence]

    def release(self, owner: SequenceOwner) -> None:
        """Finish a sequence in any state: running, waiting or idle."""
        self._scheduler.finish(owner.sequence)
        self._owners.pop(owner.sequence, None)

    def end_group(self, group: object, error: ConvoyError) -> None:
        """Fail every sequence of ``group``; only the first owner gets ``error``, for the client to get it
        once.
        """
        told: ConvoyError | None = error
        for owner in [c for c in self._owners.values() if c.group is group]:
            self.retire(owner)
            owner.fail(told)
            told = None

    def end_all(self, error: ConvoyError) -> None:
        """Fail every group with ``error``."""
        for group in {id(c.group): c.group for c in self._owners.values()}.values():
            self.end_group(group, error)

    def _advance(
        self,
        owner: SequenceOwner,
        row: Row,
        drafts: tuple[int, ...],
        outcomes: tuple[SampleResult, ...],
    ) -> int:
        sequence = owner.sequence
        before, num_near_ties = sequence.num_generated, sequence.num_near_ties
        try:
            advance = owner.advance(row, drafts, outcomes)
        except ConvoyError as error:
            # Logits that cannot be sampled from are the fault of this request: the others go on.
            self.end_group(owner.group, error)
            return 0
        num_generated = sequence.num_generated - before
        self._tell(sequence, sequence.num_near_ties - num_near_ties)
        # The callback may have aborted it already.
        if sequence not in self._owners:
            return num_generated
        if drafts:
            # The scheduler has counted only the known tokens as run: tell it how many drafts are tokens now.
            self._scheduler.keep(sequence, len(drafts), advance.num_accepted)
        if advance.complete:
            self.retire(owner)
        elif advance.rests:
            self._scheduler.rest(sequence)
            del self._owners[sequence]
        return num_generated

    def _tell(self, sequence: Sequence, num_near_ties: int) -> None:
        self.num_near_ties += num_near_ties
        # Log only the first near-tie of each text.
        if num_near_ties and sequence.num_near_ties == num_near_ties:
            text = "near_tie: two tokens within %g at position %d of a text that was run again after a loss; "
            text += "from there on it may differ from what it would have been"
            _log.warning(text, sequence.near_tie, len(sequence.tokens) - 1)


def _constrained(scheduled: Scheduled) -> Iterator[tuple[Matcher, tuple[int, ...]]]:
    """Yield the matchers of rows that bring a new token, each with the row's drafts."""
    for row, sequence, drafts in zip(scheduled.step.rows, scheduled.sequences, scheduled.drafts, strict=True):
        end = row.start + row.num_tokens - len(drafts)
        if sequence.matcher is not None and end == len(sequence.tokens):
            yield sequence.matcher, drafts


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
