"""The newest plan that came on the head's link: whatever is older was given up by the head."""

from __future__ import annotations

from convoy.errors import StepError
from convoy.transport.link.link import Received, ReceivedTensor
from convoy.wire.messages.control import Plan, ReadBlocks, Step, WriteBlocks
from convoy.wire.messages.ranks import RankOutput, RankStep

SUPERSEDED = "another plan is here"


class PlanClock:
    """Noted on the receiver's thread, before the peer's own has time for it; asked on both."""

    def __init__(self) -> None:
        self._plan: Plan | None = None

    def note(self, plan: Plan) -> None:
        self._plan = plan

    def forget(self) -> None:
        """Another link plans from now on, by a clock that may have gone back."""
        self._plan = None

    def supersedes(self, generation: int) -> bool:
        newest = self._plan
        return newest is not None and generation < newest.generation

    def makes_needless(self, item: Received) -> bool:
        """Whether it is work of an older plan: the newest, queued behind it, must not wait for it."""
        is_work = isinstance(item, ReceivedTensor) or isinstance(
            item.message, Step | RankStep | RankOutput | ReadBlocks | WriteBlocks
        )
        return is_work and self.supersedes(item.generation)

    def check_load(self, plan: Plan, member: str) -> None:
        """Raises `StepError` if a newer plan came that wants anything else of ``member``."""
        newest = self._plan
        if newest is None or newest.generation <= plan.generation:
            return
        if _part_of(newest, member) != _part_of(plan, member):
            raise StepError("a newer plan came while this one was loaded")


def _part_of(plan: Plan, member: str) -> tuple[object, ...]:
    """What a member reads for a plan: equal for two plans that need the same of it."""
    mine = next((stage for stage in plan.stages if member in stage.holders), None)
    return mine, plan.model_digest, plan.manifest, plan.kernel
