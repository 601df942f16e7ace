"""How many tokens a second a placement should come to, and what limits it: from bandwidths and round trips.

A stage takes as long as reading what a step needs of its weights and K/V, or as multiplying, whichever is
longer; a hop half of a round trip, and what the wire takes for the bytes. One sequence passes everything in
turn. With as many micro-batches in flight as stages the slowest stage sets the pace, or the way round the
ring where that takes longer than all of them. What Python and the kernels' starts cost is not in it, so
small models are slower than this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from convoy.plan.cache import CacheGroup
from convoy.plan.placement import Placement
from convoy.plan.route import Hop
from convoy.plan.spec import ModelSpec
from convoy.wire.messages import StageAssignment


@dataclass(frozen=True)
class Speed:
    """What a member measured. ``measured``: that it is its own figure, and not another's taken for it."""

    read_bytes_per_s: float  # of weights, as its kernel gets them out of memory on its threads
    flop_per_s: float  # of large matrix products in the kernel's numbers
    measured: bool = True


@dataclass(frozen=True)
class Links:
    """Round trips in seconds: by the pair of members where they were measured, else ``otherwise``."""

    otherwise_s: float
    bytes_per_s: float = 100e6  # of each wire: a gigabit, sealed; what one token sends is small
    by_pair: Mapping[frozenset[str], float] = field(default_factory=dict)

    def round_trip_s(self, one: str, other: str) -> float:
        return self.by_pair.get(frozenset((one, other)), self.otherwise_s)


@dataclass(frozen=True)
class Workload:
    """What rates are asked for: decodes of sequences of ``context`` tokens, prompts in chunks."""

    context: int = 512
    batch: int = 32
    chunk: int = 256


class Rate(msgspec.Struct, frozen=True):
    """``limit`` says in words what to make faster; ``step_s`` is the time between two steps."""

    tokens_per_s: float
    step_s: float
    batch: int
    limit: str


class RatesReport(msgspec.Struct, frozen=True):
    """``assumed``: what was not measured, in words."""

    context: int
    decode: Rate  # one sequence
    decode_batch: Rate
    prefill: Rate  # one long prompt, ``batch`` tokens in a chunk
    assumed: list[str]


@dataclass(frozen=True)
class _Work:
    """Time of one stage or hop for a step, and whose it is in words."""

    seconds: float
    limit: str


def predict(
    placement: Placement, speeds: Mapping[str, Speed], links: Links, workload: Workload
) -> RatesReport:
    """``speeds`` has every member that holds a stage."""
    num_stages = len(placement.stages)
    lone = _works(placement, speeds, links, 1, workload.context)
    in_flight = min(num_stages, workload.batch)
    shared = workload.batch / in_flight
    micro = _works(placement, speeds, links, shared, workload.context)
    chunk = _works(placement, speeds, links, workload.chunk, 0)
    return RatesReport(
        context=workload.context,
        decode=_in_turn(lone),
        decode_batch=_in_flight(micro, shared, workload.batch, num_stages, in_flight),
        prefill=_in_flight(chunk, workload.chunk, workload.chunk, num_stages, num_stages),
        assumed=_assumed(placement, speeds, links),
    )


def _works(
    placement: Placement, speeds: Mapping[str, Speed], links: Links, num_rows: float, context: int
) -> list[_Work]:
    """Of every stage, then of every hop, for so many sequences, or with context 0 tokens of one prompt."""
    spec = placement.spec
    stages = []
    for stage in placement.stages:
        kernel, speed = placement.kernels[stage.member], speeds[stage.member]
        reading = read_bytes(spec, stage, kernel, num_rows, context) / speed.read_bytes_per_s
        computing = flop(spec, stage, num_rows, context) / speed.flop_per_s
        what = "memory bandwidth" if reading >= computing else "matrix products"
        stages.append(_Work(max(reading, computing), f"{stage.member}'s {what}"))
    sent = spec.boundary_bytes(placement.hidden_dtype)
    hops = [_hop(hop, links, sent * (num_rows if hop.all_rows or context else 1)) for hop in _ring(placement)]
    return [*stages, *hops]


def _ring(placement: Placement) -> list[Hop]:
    """The hops of the route; where the last stage has the output too, its tokens go back to the head."""
    hops = list(placement.route.hops)
    last = placement.stages[-1].member
    if len(placement.stages) > 1 and last != placement.head and (not hops or hops[-1].all_rows):
        hops.append(Hop(last, placement.head, placement.spec.num_layers, all_rows=False))
    return hops


def _hop(hop: Hop, links: Links, num_bytes: float) -> _Work:
    seconds = links.round_trip_s(hop.sender, hop.receiver) / 2 + num_bytes / links.bytes_per_s
    return _Work(seconds, f"the hop from {hop.sender} to {hop.receiver}")


def _in_turn(works: Sequence[_Work]) -> Rate:
    total = sum(work.seconds for work in works)
    return Rate(_per_second(1, total), total, 1, max(works, key=lambda work: work.seconds).limit)


def _in_flight(works: Sequence[_Work], each: float, batch: int, num_stages: int, in_flight: int) -> Rate:
    """Of steps of ``each`` tokens, so many in flight at once; ``batch`` is only said again."""
    slowest = max(works[:num_stages], key=lambda work: work.seconds)
    step, limit = slowest.seconds, slowest.limit
    between = sum(work.seconds for work in works) / in_flight
    if between > step:  # they wait for their way round, not for each other
        step, limit = between, max(works, key=lambda work: work.seconds).limit
    return Rate(_per_second(each, step), step, batch, limit)


def _per_second(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def read_bytes(spec: ModelSpec, stage: StageAssignment, kernel: str, num_rows: float, context: int) -> float:
    """That a step reads: weights that its tokens pass, and K/V of ``context`` tokens for each row."""
    layers = spec.layers[stage.start : stage.end]
    weights = sum(layer.read_bytes(kernel, spec.experts_per_token, num_rows) for layer in layers)
    if stage.output:
        weights += spec.output_bytes(kernel)
    return weights + num_rows * spec.kv_bytes(stage.start, stage.end, context, kernel)


def flop(spec: ModelSpec, stage: StageAssignment, num_rows: float, context: int) -> float:
    """Multiplications and additions of a step; attention of a prompt's chunk itself is not counted."""
    layers = spec.layers[stage.start : stage.end]
    weights = sum(layer.used_elements(spec.experts_per_token) for layer in layers)
    outputs = num_rows if context else 1
    products = num_rows * weights + (outputs * spec.vocab_size * spec.hidden_size if stage.output else 0)
    keys = sum(
        len([layer for layer in group.layers if stage.start <= layer < stage.end]) * _per_key(group, context)
        for group in spec.cache_groups
    )
    return 2 * (products + num_rows * keys)


def _per_key(group: CacheGroup, context: int) -> float:
    """Of one token in one layer, over all the keys that it sees."""
    if group.kind not in {"kv", "latent", "entries"}:
        return 0.0
    return (
        group.num_heads * (group.head_dim + group.value_dim) * group.retained_tokens(context) / group.stride
    )


def _assumed(placement: Placement, speeds: Mapping[str, Speed], links: Links) -> list[str]:
    names = [stage.member for stage in placement.stages if not speeds[stage.member].measured]
    told = (
        [f"that {', '.join(names)} {'is' if len(names) == 1 else 'are'} as fast as this machine"]
        if names
        else []
    )
    unknown = [
        f"{hop.sender} to {hop.receiver}"
        for hop in _ring(placement)
        if frozenset((hop.sender, hop.receiver)) not in links.by_pair
    ]
    if unknown:
        told.append(f"a round trip of {links.otherwise_s * 1000:g} ms: {', '.join(unknown)}")
    if len(placement.stages) > 1:
        told.append(f"wires that carry {links.bytes_per_s / 1e6:g} MB/s")
    return told
