"""The check that a stage fits its member, in numbers that a person can compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from convoy.config.kernels import QUANTIZED, form_of, kv_form, quantized_kernel
from convoy.errors import PlanError
from convoy.plan.offer import MemberOffer
from convoy.plan.partition import consecutive
from convoy.plan.span import Span, layers_text
from convoy.plan.spec.model import ModelSpec
from convoy.plan.spec.sharding import rank_spec

# Of members, or of ranks together, by name.
Offers = Mapping[str, MemberOffer]

# The planned share of free memory: the rest is for the system and for steps, `plan.memory.working`.
MEMORY_SHARE = 0.8
# Of a CUDA device: the rest is left to the driver, to kernels that are compiled later, and to other users.
CUDA_MEMORY_SHARE = 0.92
# One block: a stage without room for it cannot run a token.
RESERVE_TOKENS = 16


def stage_bytes(spec: ModelSpec, span: Span, dtype: str, world_size: int = 1) -> int:
    """Return the least memory a member needs: weights of the stage or rank, and K/V for one block."""
    own = rank_spec(spec, world_size)
    weights = own.weight_bytes(span.start, span.end, embed=span.embed, output=span.output, dtype=dtype)
    return weights + own.kv_bytes(span.start, span.end, RESERVE_TOKENS, dtype)


def check_memory(spec: ModelSpec, owners: Sequence[tuple[str, Span]], offers: Offers) -> None:
    """Raise PlanError naming each stage that does not fit, its bytes, and those of its member."""
    refusals = []
    for index, (name, span) in enumerate(owners):
        needed, offer = _needed(spec, span, offers[name]), offers[name]
        if needed > offer.memory_bytes:
            need, have = _apart(needed, offer.memory_bytes)
            layers = layers_text(span.start, span.end)
            if offer.world_size == 1:
                refusals.append(f"stage {index} on {name} needs {need} for {layers} but has {have}")
                continue
            least = min(offer.each, key=lambda rank: rank.memory_bytes).name
            refusals.append(
                f"stage {index} on {offer.label} needs {need} on each rank for its part of {layers} "
                f"but {least} has {have}"
            )
    if refusals:
        raise PlanError("; ".join(refusals), hint=_remedy(spec, owners, offers))


def _remedy(spec: ModelSpec, owners: Sequence[tuple[str, Span]], offers: Offers) -> str:
    """Return the hint: the memory of all stages now, and under each kind of ``--quantize`` that lowers it.

    It names the form of weights and K/V, the kinds under which the stages fit, and the number of machines
    like the largest that would fit.
    """
    now, unpacked = _together(spec, owners, offers), _unpacked_text(spec, owners, offers)
    used = [offers[name] for name, _ in owners]
    ways, less = {"": used}, []
    for kind in QUANTIZED:
        rounded = {
            name: replace(one, kernel=quantized_kernel(one.kernel, kind)) for name, one in offers.items()
        }
        needed = _together(spec, owners, rounded)
        if needed < now:
            is_enough = fits(spec, relieve(spec, owners, rounded), rounded)
            note = " (fits)" if is_enough else ""
            less.append(f"{format_bytes(needed)} with --quantize {kind}{note}")
            ways[f" with --quantize {kind}"] = [rounded[name] for name, _ in owners]
    remedy = ", or round the weights" if less else ""
    join = ", raise [model] memory_gb where a member sets it"
    join += ", move layers to one with more memory" if less else ", or move layers to one with more memory"
    forms = " and ".join(sorted({_form_text(spec, one.form) for one in used}))
    kv = sorted({kv_form(one.form, group.kv_dtype).name for one in used for group in spec.cache_groups})
    needs = [f"{format_bytes(now)} with {forms} and K/V in {' and '.join(kv)}", *less]
    machines = _machines_text(spec, ways)
    return f"add a member{join}{remedy}: all stages need {', '.join(needs)}{machines}{unpacked}"


def _form_text(spec: ModelSpec, word: str) -> str:
    """Return a kernel with the form of its weights, like ``exact-q8 (8-bit weights)``."""
    form = form_of(word)
    matrices = [m for layer in spec.layers for m in (*layer.each.linears, *layer.experts.linears)]
    kept = (form.keeps and any(m.kept_bytes for m in matrices)) or (
        form.keeps_on_card and any(m.card_bytes for m in matrices)
    )
    if kept and not form.bits:
        return f"{word} (weights as in the file)"
    return f"{word} ({f'{form.bits}-bit' if form.bits else form.dtype} weights)"


def _machines_text(spec: ModelSpec, ways: Mapping[str, Sequence[MemberOffer]]) -> str:
    """Return the part of the hint with the number of machines that fit, by way to hold the weights."""
    told = []
    for way, offers in ways.items():
        largest = max(offers, key=lambda offer: offer.memory_bytes)
        if largest.world_size > 1:
            # The slices of ranks are of other sizes, so their number is another question.
            return ""
        count = machines_needed(spec, largest)
        if count is not None:
            told.append(f"{count}{way}")
    size = format_bytes(max(offer.memory_bytes for offers in ways.values() for offer in offers))
    return f"; machines with {size} that fit: {', '.join(told) or 'no number of them'}"


def machines_needed(spec: ModelSpec, offer: MemberOffer) -> int | None:
    """Return the least number of machines like ``offer`` that hold the model; None if no number does.

    The first has the embedding and the output, and each holds as many layers as fit. With equal machines no
    other way needs fewer, because a shorter run never lets the next one end later.
    """
    start = count = 0
    while start < spec.num_layers:
        low, high = start, spec.num_layers
        while low < high:
            end = (low + high + 1) // 2
            needed = _needed(spec, Span(start, end, output=start == 0), offer)
            low, high = (end, high) if needed <= offer.memory_bytes else (low, end - 1)
        while low > start and low in spec.forbidden_cuts:
            low -= 1
        if low == start:
            return None
        start, count = low, count + 1
    return count


def _together(spec: ModelSpec, owners: Sequence[tuple[str, Span]], offers: Offers) -> int:
    """Return the memory of all stages, over all of their ranks."""
    return sum(offers[name].world_size * _needed(spec, span, offers[name]) for name, span in owners)


def _unpacked_text(spec: ModelSpec, owners: Sequence[tuple[str, Span]], offers: Offers) -> str:
    """Return the part of the hint for members that need more because they have no compiled code."""
    told = []
    for name, span in owners:
        kept = _needed(spec, span, replace(offers[name], unpacks=False))
        if kept < _needed(spec, span, offers[name]):
            told.append(f"{offers[name].label} would need {format_bytes(kept)}")
    if not told:
        return ""
    return f"; with compiled code {', '.join(told)} (`convoy doctor` there says why there is none)"


def fits(spec: ModelSpec, owners: Sequence[tuple[str, Span]], offers: Offers) -> bool:
    """Return whether `check_memory` would pass."""
    return all(_needed(spec, span, offers[name]) <= offers[name].memory_bytes for name, span in owners)


def _needed(spec: ModelSpec, span: Span, offer: MemberOffer) -> int:
    return stage_bytes(spec, span, offer.form, offer.world_size)


def relieve(
    spec: ModelSpec,
    owners: Sequence[tuple[str, Span]],
    offers: Offers,
    allowed: Callable[[Sequence[tuple[str, Span]]], bool] = lambda _owners: True,
) -> list[tuple[str, Span]]:
    """Shift layers, one at a time, from stages that do not fit to the member with most room left.

    Embedding and output weigh on two members only, so shares by memory alone may overfill those while others
    have room. ``allowed`` accepts or refuses a shift; a refused one goes to the member with next most room.
    Return consecutive owners of the same layers; they may still not fit.
    """
    current = list(owners)
    for _ in range(spec.num_layers):
        room = [offers[name].memory_bytes - _needed(spec, span, offers[name]) for name, span in current]
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
    """Return the owners with one layer moved from ``giver`` to ``taker``; runs in between move along."""
    counts = [span.end - span.start for _, span in owners]
    counts[giver] -= 1
    counts[taker] += 1
    return [
        (member, Span(start, end, span.output))
        for (member, span), (start, end) in zip(owners, consecutive(counts, owners[0][1].start), strict=True)
    ]


def format_bytes(num_bytes: int, digits: int = 1) -> str:
    """Return decimal units, as for disks: ``9.1 GB``, ``48.0 MB``, ``512 B``."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.{digits}f} {unit}"
    return f"{num_bytes} B"


def _apart(needed: int, offered: int) -> tuple[str, str]:
    """Return both numbers with as many digits as it takes to tell them apart."""
    for digits in range(1, 12):
        need, have = format_bytes(needed, digits), format_bytes(offered, digits)
        if need != have:
            return need, have
    return f"{needed} B", f"{offered} B"
