"""Executors of a head that is rank 0 of a stage: of the whole model, without a ring, or of a part of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from convoy.engine.ranks.leader import LeaderStage
from convoy.engine.run.deadline import StepClock
from convoy.engine.run.executor import Kv, StepResult
from convoy.engine.run.local import LocalExecutor
from convoy.engine.run.pipeline import PipelineExecutor, PipelineOptions
from convoy.errors import CollectiveError, ConvoyError, StageLost
from convoy.model.sampling.output_rows import SampleJob
from convoy.transport.link.link import Link, Received, ReceivedMessage
from convoy.wire.messages.control import StageAssignment, Step, StepFailed


class RanksExecutor(LocalExecutor):
    """Run steps as `LocalExecutor` does, with other ranks that may be lost or may report a failure."""

    def __init__(self, stage: LeaderStage, plan_id: int, depth: int = 1) -> None:
        super().__init__(stage, depth)
        self._leader = stage
        self._plan_id = plan_id
        self._lost: StageLost | None = None
        # The members that failed first, as a rank reports.
        self._said: tuple[str, ...] = ()

    @property
    def suspects(self) -> tuple[str, ...]:
        """Return the members that failed first; two if it may have been either."""
        culprit = self._leader.culprit
        return self._said or (() if culprit is None else (culprit,))

    def deliver(self, link: Link, received: Received) -> None:
        """Take a message that the collective did not take; receiver threads of the other ranks' links call
        this.
        """
        if not isinstance(received, ReceivedMessage) or received.plan_id != self._plan_id:
            return
        if isinstance(received.message, StepFailed):
            about = received.message.about
            # A rank that accuses another may be at fault itself, so both are suspected.
            doubted = about in self._leader.names and about != link.peer
            self._said = self._said or ((about, link.peer) if doubted else (link.peer,))
            text = f"{link.peer} could not run a step: {received.message.reason}"
            self._end(StageLost(text, public=f"{link.peer} could not run a step"))

    def lost(self, link: Link, error: ConvoyError) -> None:
        """End the executor, because the link of a rank ended."""
        lost = StageLost(
            f"the link to {link.peer} ended: {error.message}",
            hint="start that member again",
            public=f"the link to {link.peer} ended",
        )
        lost.__cause__ = error
        self._end(lost)

    def submit(self, step: Step, jobs: Sequence[SampleJob]) -> None:
        self._check()
        super().submit(step, jobs)

    def read_blocks(self, start: int, end: int, blocks: Sequence[int]) -> Kv:
        self._check()
        return super().read_blocks(start, end, blocks)

    def write_blocks(self, start: int, blocks: Sequence[int], tags: Sequence[bytes], kv: Kv) -> None:
        self._check()
        super().write_blocks(start, blocks, tags, kv)

    def close(self) -> None:
        self._leader.close()

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _end(self, error: StageLost) -> None:
        self._lost = self._lost or error
        self._leader.abort(error)


class RanksPipeline(PipelineExecutor):
    """Run steps as `PipelineExecutor` does, for a head that is rank 0 of a stage of several ranks."""

    def __init__(
        self,
        stage: LeaderStage,
        stages: Sequence[StageAssignment],
        head: str,
        links: dict[str, Link],
        options: PipelineOptions,
        *,
        clock: StepClock | None = None,
    ) -> None:
        super().__init__(stage, stages, head, links, options, clock=clock)
        self._leader = stage

    def submit(self, step: Step, jobs: Sequence[SampleJob]) -> None:
        with self._naming_culprit():
            super().submit(step, jobs)

    def collect(self) -> StepResult:
        with self._naming_culprit():
            return super().collect()

    def close(self) -> None:
        self._leader.close()
        super().close()

    @contextmanager
    def _naming_culprit(self) -> Iterator[None]:
        try:
            yield
        except CollectiveError:
            if not self.suspects and self._leader.culprit is not None:
                self.suspects = (self._leader.culprit,)
            raise
