"""Choose the executor of a plan: over one stage or several, each of one rank or more.

It is apart from the head because it alone names every class of executor.
"""

from __future__ import annotations

from convoy.cluster.active_plan import ActivePlan
from convoy.cluster.options import HeadOptions
from convoy.engine.ranks.executor import RanksExecutor, RanksPipeline
from convoy.engine.ranks.leader import LeaderStage
from convoy.engine.run.deadline import StepClock
from convoy.engine.run.executor import Executor
from convoy.engine.run.local import LocalExecutor
from convoy.engine.run.pipeline import PipelineExecutor, PipelineOptions
from convoy.engine.run.stage_worker import StepLog
from convoy.model.stage import Stage
from convoy.transport.link.link import Link


def make_executor(
    active: ActivePlan,
    stage: Stage,
    leader: LeaderStage | None,
    *,
    head: str,
    links: dict[str, Link],
    options: HeadOptions,
    clock: StepClock,
    log: StepLog,
) -> Executor:
    """Return the executor of a plan.

    ``stage`` is the head's own. ``leader`` is set if other ranks hold that stage too. ``log`` takes the times
    of steps over several stages.
    """
    plan, depth = active.plan, options.depth(active.num_places)
    options = options.for_kernels(active.kernels)
    if len(plan.stages) == 1:
        return LocalExecutor(stage, depth) if leader is None else RanksExecutor(leader, plan.plan_id, depth)
    chosen = PipelineOptions(
        plan_id=plan.plan_id,
        depth=depth,
        step_timeout_s=options.step_timeout_s,
        activation_dtype=plan.activation_dtype,
        max_step_tokens=options.step_tokens,
        overlaps=leader is None and stage.overlaps,
        feeds=leader is None,
    )
    if leader is None:
        return PipelineExecutor(stage, plan.stages, head, links, chosen, clock=clock, log=log)
    return RanksPipeline(leader, plan.stages, head, links, chosen, clock=clock)
