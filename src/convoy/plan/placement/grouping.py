"""Ranks: members that hold a stage together, and the offer that they make to a plan as one.

The first rank is the stage's member, which talks to the pipeline. All ranks' slices have the same size, so
the smallest memory bounds them all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from convoy.config.kernels import CUDA_KERNELS, on_device
from convoy.config.table import MAX_RANKS
from convoy.errors import PlanError, SpanError
from convoy.plan.offer import MemberOffer
from convoy.plan.span import JOINT, split_key
from convoy.plan.spec.model import ModelSpec
from convoy.plan.spec.sharding import check_sharding


def is_grouped(spans: Mapping[str, str] | None) -> bool:
    """Return whether any span is for several ranks."""
    return any(len(split_key(key)) > 1 for key in spans or ())


def names_in(spans: Mapping[str, str]) -> list[str]:
    """Return all members that spans are for."""
    return [name for key in spans for name in split_key(key)]


def best_world_size(
    spec: ModelSpec, num_members: int, ranks: int | None = None, *, fewer: bool = False
) -> int:
    """Return the most ranks that members can form in one stage.

    ``ranks`` asks for that number, or with ``fewer`` for at most that number. Raises PlanError if a stage of
    ``ranks`` is impossible, or if no number from two on is possible.
    """
    most = min(num_members, MAX_RANKS)
    if ranks is not None and fewer:
        most = min(most, ranks)
    elif ranks is not None:
        if ranks > most:
            raise PlanError(
                f"{ranks} ranks for each stage were asked for, and there are {num_members} members",
                hint="lower --ranks, or add members",
            )
        check_sharding(spec, ranks)
        return ranks
    refused: PlanError | None = None
    for world_size in range(most, 1, -1):
        try:
            check_sharding(spec, world_size)
        except PlanError as error:
            # In the end, the refusal of the fewest ranks.
            refused = error
            continue
        return world_size
    raise refused or PlanError(f"{num_members} members make no group of 2 ranks")


def in_groups(members: Sequence[MemberOffer], world_size: int) -> list[MemberOffer]:
    """Return offers of ``world_size`` ranks each, the head first; members that are left over stand alone."""
    ordered = sorted(members, key=lambda member: not member.head)
    num_full = len(ordered) // world_size * world_size
    groups = [ordered[i : i + world_size] for i in range(0, num_full, world_size)]
    return [*(gather(group) for group in groups), *ordered[num_full:]]


def gather(ranks: Sequence[MemberOffer]) -> MemberOffer:
    """Return the offer of ranks together: it has the smallest memory and the lowest level of them.

    Raises PlanError if the ranks' kernels differ, SpanError if the head is not rank 0.
    """
    if len(ranks) == 1:
        return ranks[0]
    first, label = ranks[0], JOINT.join(member.name for member in ranks)
    if len(ranks) > MAX_RANKS:
        raise PlanError(
            f"{label} are {len(ranks)} ranks, expected at most {MAX_RANKS}", hint="put fewer members together"
        )
    head = next((member.name for member in ranks[1:] if member.head), None)
    if head is not None:
        names = JOINT.join([head, *(member.name for member in ranks if member.name != head)])
        raise SpanError(f"the head, {head}, is not the first of {label}", hint=f"write {names}")
    other = next((member for member in ranks if member.kernel != first.kernel), None)
    if other is not None:
        raise PlanError(
            f"{first.name} would run {first.kernel} and {other.name} {other.kernel}, "
            "expected one kernel for all ranks of a stage",
            hint="set one kernel under [model] of these members"
            if on_device(first.kernel) == on_device(other.kernel)
            else 'hold whole layers on each: --parallel pipeline, or set device = "cpu" on all of them',
        )
    if first.kernel in CUDA_KERNELS:
        raise PlanError(
            f"{first.name} runs {first.kernel}, and ranks of a stage compute on CPUs or MLX",
            hint='hold whole layers on it: --parallel pipeline, or set device = "cpu" on its members',
        )
    return dataclasses.replace(
        first,
        memory_bytes=min(member.memory_bytes for member in ranks),
        num_threads=min(member.num_threads for member in ranks),
        level=min(member.level for member in ranks),
        ranks=tuple(ranks),
        unpacks=any(member.unpacks for member in ranks),
    )


def gather_named(
    members: Sequence[MemberOffer], spans: Mapping[str, str]
) -> tuple[list[MemberOffer], dict[str, str]]:
    """Return the offers, with members joined where a span names them together, and the spans by rank 0.

    Raises SpanError.
    """
    keys = {key: split_key(key) for key in spans}
    named = [name for names in keys.values() for name in names]
    twice = next((name for name in named if named.count(name) > 1), None)
    if twice is not None:
        raise SpanError(
            f"two spans are for {twice}, expected one for each member", hint="remove one of the two spans"
        )
    by_name = {member.name: member for member in members}
    groups = {names[0]: names for names in keys.values() if len(names) > 1}
    unknown = next((n for names in groups.values() for n in names if n not in by_name), None)
    if unknown is not None:
        raise SpanError(
            f"a span is for {unknown}, expected a member: {', '.join(by_name)}",
            hint="name the members as the roster does",
        )
    followers = {name for names in groups.values() for name in names[1:]}
    offers = [
        gather([by_name[name] for name in groups[member.name]]) if member.name in groups else member
        for member in members
        if member.name not in followers
    ]
    return offers, {keys[key][0]: span for key, span in spans.items()}
