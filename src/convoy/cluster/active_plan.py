"""A plan once every member has loaded: what runs, until the next one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from convoy.cluster.options import HeadOptions
from convoy.errors import PlanError
from convoy.plan.memory.blocks import Room, choose_blocks
from convoy.plan.placement.placement import Placement
from convoy.plan.spec.model import ModelSpec
from convoy.wire.codec import encode_message
from convoy.wire.messages.control import Plan


@dataclass(frozen=True, slots=True)
class ActivePlan:
    """What the plan came to."""

    plan: Plan
    placement: Placement
    weight_bytes: dict[str, int]
    num_blocks: tuple[int, ...]  # by cache group
    max_context: int
    num_places: int = 1  # stages, of which the head's own counts once for each of its devices

    @property
    def members(self) -> set[str]:
        """All ranks of all stages."""
        return {name for stage in self.plan.stages for name in stage.holders}

    @property
    def kernels(self) -> list[str]:
        """Of each stage."""
        return kernels_of(self.plan)


def world_sizes(plan: Plan) -> list[int]:
    """Over how many ranks each layer's sums go, those of the embedding and the output last: where that is
    equal, so are the bits of exact kernels.
    """
    layers = [stage.world_size for stage in plan.stages for _ in range(stage.start, stage.end)]
    ends = [next(stage.world_size for stage in plan.stages if stage.embed)]
    return layers + ends + [stage.world_size for stage in plan.stages if stage.output]


class NoRoom(PlanError):  # noqa: N818
    """No K/V fits beside the weights of ``member``, or it does not say what K/V takes."""

    def __init__(self, member: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.member = member


def common_blocks(
    spec: ModelSpec, rooms: Mapping[str, Room], plan: Plan, options: HeadOptions, *, is_first: bool
) -> tuple[int, ...]:
    """How many blocks of each cache group fit all members, each rank counted by itself. Raises `NoRoom`."""
    groups = spec.cache_groups
    for name, room in rooms.items():
        if len(room.block_bytes) != len(groups) or min(room.block_bytes) < 0:
            raise NoRoom(name, f"{name} does not say what a K/V block of each of {len(groups)} groups takes")
    options = options.for_kernels(kernels_of(plan))
    demand = options.demand(block_size=plan.block_size, max_context=plan.max_context)
    choice = choose_blocks(groups, rooms, demand)
    # After a loss fewer are better than none: requests that need more end alone.
    least = options.num_blocks if is_first and options.num_blocks else 1
    if choice.most < least:
        raise NoRoom(
            choice.tightest,
            f"{choice.tightest} has memory for {choice.most} K/V blocks beside its weights, "
            f"and at least {least} are needed",
            hint="give that member fewer layers or more memory",
        )
    return choice.num_blocks


def kernels_of(plan: Plan) -> list[str]:
    """Of each stage."""
    return [plan.kernel_of(position) for position in range(len(plan.stages))]


def plan_digest(plan: Plan) -> bytes:
    """SHA-256 of the plan's encoding: what `Activate` names."""
    return hashlib.sha256(encode_message(plan)).digest()
