"""A plan once every member has loaded its stage: it runs until the next one."""

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
    """Hold a plan that runs, with its weights and K/V blocks."""

    plan: Plan
    placement: Placement
    weight_bytes: dict[str, int]
    # By cache group.
    num_blocks: tuple[int, ...]
    max_context: int
    # Stages. The head's own counts once for each of its devices.
    num_places: int = 1

    @property
    def members(self) -> set[str]:
        """Return all ranks of all stages."""
        return {name for stage in self.plan.stages for name in stage.holders}

    @property
    def kernels(self) -> list[str]:
        """Return the kernel of each stage."""
        return kernels_of(self.plan)


def world_sizes(plan: Plan) -> list[int]:
    """Return over how many ranks each layer's sums go, then those of the embedding and of the output.

    Where two plans have equal lists, exact kernels give equal bits.
    """
    layers = [stage.world_size for stage in plan.stages for _ in range(stage.start, stage.end)]
    ends = [next(stage.world_size for stage in plan.stages if stage.embed)]
    return layers + ends + [stage.world_size for stage in plan.stages if stage.output]


class NoRoom(PlanError):  # noqa: N818
    """Say that no K/V fits beside the weights of ``member``, or that it reports no size of a block."""

    def __init__(self, member: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.member = member


def common_blocks(
    spec: ModelSpec, rooms: Mapping[str, Room], plan: Plan, options: HeadOptions, *, is_first: bool
) -> tuple[int, ...]:
    """Return how many blocks of each cache group fit all members, each rank counted by itself.

    Raises `NoRoom`.
    """
    groups = spec.cache_groups
    for name, room in rooms.items():
        if len(room.block_bytes) != len(groups) or min(room.block_bytes) < 0:
            raise NoRoom(name, f"{name} does not say what a K/V block of each of {len(groups)} groups takes")
    options = options.for_kernels(kernels_of(plan))
    demand = options.demand(block_size=plan.block_size, max_context=plan.max_context)
    choice = choose_blocks(groups, rooms, demand)
    # After a loss, fewer blocks are better than no plan: only requests that need more of them end.
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
    """Return the kernel of each stage."""
    return [plan.kernel_of(position) for position in range(len(plan.stages))]


def plan_digest(plan: Plan) -> bytes:
    """Return the SHA-256 of the plan's encoding, which `Activate` names."""
    return hashlib.sha256(encode_message(plan)).digest()
