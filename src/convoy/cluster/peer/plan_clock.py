"""Know the newest plan that came on the head's link: the head has given up every older one.

It is apart because the receiver thread and the peer's own thread share this state, and no other.
"""

from __future__ import annotations

from convoy.errors import StepError
from convoy.transport.link.link import Received, ReceivedTensor
from convoy.wire.messages.control import Plan, ReadBlocks, Step, WriteBlocks
from convoy.wire.messages.ranks import RankOutput, RankStep

SUPERSEDED = "another plan is here"


class PlanClock:
    """Hold the newest plan.

    The receiver's thread notes it, before the peer's own thread handles it; both read it.
    """

    def __init__(self) -> None:
        self._plan: Plan | None = None

    def note(self, plan: Plan) -> None:
        self._plan = plan

    def forget(self) -> None:
        """Forget the newest plan, because another link plans from now on and its clock may be behind."""
        self._plan = None

    def supersedes(self, plan_id: int) -> bool:
        newest = self._plan
        return newest is not None and plan_id < newest.plan_id

    def makes_needless(self, item: Received) -> bool:
        """Return whether ``item`` is work of an older plan.

        The newest plan, queued behind it, must not wait for it.
        """
        is_work = isinstance(item, ReceivedTensor) or isinstance(
            item.message, Step | RankStep | RankOutput | ReadBlocks | WriteBlocks
        )
        return is_work and self.supersedes(item.plan_id)

    def check_load(self, plan: Plan, member: str) -> None:
        """Raise `StepError` if a newer plan came that needs other parts of the model from ``member``."""
        newest = self._plan
        if newest is None or newest.plan_id <= plan.plan_id:
            return
        if _part_of(newest, member) != _part_of(plan, member):
            raise StepError("a newer plan came while this one was loaded")


def _part_of(plan: Plan, member: str) -> tuple[object, ...]:
    """Return the facts by which a member loads a plan: equal for two plans that need the same parts of it."""
    mine = next((stage for stage in plan.stages if member in stage.holders), None)
    return mine, plan.model_digest, plan.manifest, plan.kernel
