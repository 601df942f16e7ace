"""Whether a stage fits its member, in numbers that a person can compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from convoy.errors import PlanError
from convoy.plan.partition import consecutive
from convoy.plan.span import Span, layers_text
from convoy.plan.spec import ModelSpec

Kernels = Mapping[str, str]  # of each member, by name: in which form it holds weights and K/V

MEMORY_SHARE = 0.8  # of what is free: the rest is for the system and for what a step needs, `plan.working`
RESERVE_TOKENS = 16  # one block: a stage without room for that cannot run a token


def stage_bytes(spec: ModelSpec, span: Span, dtype: str) -> int:
    """The least a member must have: the stage's weights, and K/V for one block."""
    weights = spec.weight_bytes(span.start, span.end, embed=span.embed, output=span.output, dtype=dtype)
    return weights + spec.kv_bytes(span.start, span.end, RESERVE_TOKENS, dtype)


def check_memory(
    spec: ModelSpec, owners: Sequence[tuple[str, Span]], memory_bytes: Mapping[str, int], kernels: Kernels
) -> None:
    """Raise PlanError naming each stage that does not fit, with what it needs and what its member has."""
    refusals = []
    for index, (member, span) in enumerate(owners):
        needed, offered = stage_bytes(spec, span, kernels[member]), memory_bytes[member]
        if needed > offered:
            need, have = _apart(needed, offered)
            layers = layers_text(span.start, span.end)
            refusals.append(f"stage {index} on {member} needs {need} for {layers} but has {have}")
    if refusals:
        raise PlanError("; ".join(refusals), hint="add a member, or move layers to one with more memory")


def fits(
    spec: ModelSpec, owners: Sequence[tuple[str, Span]], memory_bytes: Mapping[str, int], kernels: Kernels
) -> bool:
    """Whether `check_memory` would pass."""
    return all(stage_bytes(spec, span, kernels[member]) <= memory_bytes[member] for member, span in owners)


def relieve(
    spec: ModelSpec,
    owners: Sequence[tuple[str, Span]],
    memory_bytes: Mapping[str, int],
    kernels: Kernels,
    allowed: Callable[[Sequence[tuple[str, Span]]], bool] = lambda _owners: True,
) -> list[tuple[str, Span]]:
    """Shift layers, one at a time, from stages that do not fit to the member with most room left.

    Embedding and output weigh on two members only, so shares by memory alone may overfill those while
    others have room. ``allowed`` says which shifts may be made; one that may not goes to the member with
    next most room. Returns consecutive owners of the same layers; they may still not fit.
    """
    current = list(owners)
    for _ in range(spec.num_layers):
        room = [memory_bytes[member] - stage_bytes(spec, span, kernels[member]) for member, span in current]
        fullest = room.index(min(room))
        if room[fullest] >= 0 or current[fullest][1].end - current[fullest][1].start == 1:
            break
        by_room = sorted((i for i in range(len(room)) if room[i] > 0), key=lambda i: -room[i])
        shifted = (_shift(current, fullest, roomy) for roomy in by_room)
        better = next((owners for owners in shifted if allowed(owners)), None)
        if better is None:
            break
        current = better
    return current


def _shift(owners: Sequence[tuple[str, Span]], giver: int, taker: int) -> list[tuple[str, Span]]:
    """One layer more for one and less for the other; those between them move along."""
    counts = [span.end - span.start for _, span in owners]
    counts[giver] -= 1
    counts[taker] += 1
    return [
        (member, Span(start, end, span.output))
        for (member, span), (start, end) in zip(owners, consecutive(counts, owners[0][1].start), strict=True)
    ]


def format_bytes(num_bytes: int, digits: int = 1) -> str:
    """Decimal units, as disks and ``design.md`` have them: ``9.1 GB``, ``48.0 MB``, ``512 B``."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.{digits}f} {unit}"
    return f"{num_bytes} B"


def _apart(needed: int, offered: int) -> tuple[str, str]:
    """Both numbers with as many digits as it takes to tell them apart."""
    for digits in range(1, 12):
        need, have = format_bytes(needed, digits), format_bytes(offered, digits)
        if need != have:
            return need, have
    return f"{needed} B", f"{offered} B"
