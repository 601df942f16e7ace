"""How many tokens a second a placement should come to, and what limits it: from speeds and round trips.

A stage takes what reading the weights takes that a step passes, what multiplying takes longer than that,
what looking back on K/V takes, and what each layer costs however little there is to do. A hop takes half of a
round trip, and what the wire takes for the bytes. One sequence passes everything in turn. With as many
micro-batches in flight as stages the slowest stage sets the pace, or the way round the ring where that takes
longer than all of them; of a prompt, the first chunk finds stages behind it idle, and the last before it.
Scheduling, drawing and text are not in it, and members of one machine do not slow
each other down.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from convoy.plan.placement.placement import Placement
from convoy.plan.placement.route import Hop
from convoy.plan.spec.cache import CacheGroup
from convoy.plan.spec.model import ModelSpec
from convoy.plan.spec.sharding import rank_spec
from convoy.plan.spec.weights import LayerWeights
from convoy.plan.speed import REFERENCE_LINEARS, Speed
from convoy.wire.messages.control import StageAssignment

_PARTIAL_BYTES = 4  # parts of sums are float32


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
    """What is asked for: decodes of sequences of ``context`` tokens, and prompts as long, in chunks."""

    context: int = 512
    batch: int = 32
    chunk: int = 256


@dataclass(frozen=True)
class StepLoad:
    """One step: decodes that look back on ``context`` tokens each, or a chunk of one prompt that does."""

    num_rows: float  # of hidden states
    context: float
    is_chunk: bool = False

    @property
    def num_outputs(self) -> float:
        return 1 if self.is_chunk else self.num_rows


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
    prefill: Rate  # one prompt of ``context`` tokens, ``batch`` of them in a chunk
    assumed: list[str]


@dataclass(frozen=True)
class StageTime:
    """Seconds of one stage for a step, by what takes them; of several ranks, of the slowest."""

    reading_s: float
    multiplying_s: float  # beyond that
    layers_s: float  # what Python and the operations' starts take
    summing_s: float = 0.0  # what ranks wait for each other's parts of sums

    @property
    def total_s(self) -> float:
        return self.reading_s + self.multiplying_s + self.layers_s + self.summing_s

    @property
    def limit(self) -> str:
        parts = {
            "memory bandwidth": self.reading_s,
            "matrix products": self.multiplying_s,
            "own time for each layer": self.layers_s,
            "sums over links": self.summing_s,
        }
        return max(parts, key=lambda what: parts[what])


@dataclass(frozen=True)
class _Work:
    """Time of one stage or hop for a step, and whose it is in words."""

    seconds: float
    limit: str


def predict(
    placement: Placement, speeds: Mapping[str, Speed], links: Links, workload: Workload
) -> RatesReport:
    """``speeds`` has every member that holds a stage, or a slice of one."""
    num_stages = len(placement.stages)
    lone = _works(placement, speeds, links, StepLoad(1, workload.context))
    in_flight = min(num_stages, workload.batch)
    shared = workload.batch / in_flight
    micro = _works(placement, speeds, links, StepLoad(shared, workload.context))
    size = min(workload.chunk, workload.context)
    behind = (workload.context - size) / 2  # of a chunk, in the middle of the prompt
    chunk = _works(placement, speeds, links, StepLoad(size, behind, is_chunk=True))
    return RatesReport(
        context=workload.context,
        decode=_in_turn(lone),
        decode_batch=_in_flight(micro, shared, workload.batch, num_stages, in_flight),
        prefill=_one_prompt(chunk, size, workload.context, num_stages),
        assumed=_assumed(placement, speeds, links),
    )


def _works(placement: Placement, speeds: Mapping[str, Speed], links: Links, load: StepLoad) -> list[_Work]:
    """Of every stage, then of every hop."""
    stages = []
    for stage in placement.stages:
        time = _time_of_ranks(placement, stage, speeds, links, load)
        stages.append(_Work(time.total_s, f"{'+'.join(stage.holders)}'s {time.limit}"))
    sent = placement.spec.boundary_bytes(placement.hidden_dtype)
    rows = {True: load.num_rows, False: load.num_outputs}
    hops = [_hop(hop, links, sent * rows[hop.all_rows]) for hop in _ring(placement)]
    return [*stages, *hops]


def _time_of_ranks(
    placement: Placement, stage: StageAssignment, speeds: Mapping[str, Speed], links: Links, load: StepLoad
) -> StageTime:
    """Of the slowest, for which the others wait at every sum."""
    spec, kernel = rank_spec(placement.spec, stage.world_size), placement.kernels[stage.member]
    times = [stage_time(spec, stage, kernel, speeds[name], load) for name in stage.holders]
    slowest = max(times, key=lambda time: time.total_s)
    return replace(slowest, summing_s=summing_s(placement.spec, stage, links, load))


def summing_s(spec: ModelSpec, stage: StageAssignment, links: Links, load: StepLoad) -> float:
    """What the ranks of a stage send each other in a step: sums of every layer, and logits at its end."""
    if stage.world_size == 1:
        return 0.0
    row_bytes = spec.hidden_size * _PARTIAL_BYTES
    total = num_all_reduces(stage) * all_reduce_s(stage.holders, links, load.num_rows * row_bytes)
    if stage.output:
        logits = load.num_outputs * spec.vocab_size * _PARTIAL_BYTES
        total += _trip_s(stage.holders, links) + logits / links.bytes_per_s
    return total


def num_all_reduces(stage: StageAssignment) -> int:
    """Of a step: behind attention and behind the MLP of each layer, and of the embedding."""
    return 2 * (stage.end - stage.start) + stage.embed


def all_reduce_s(ranks: Sequence[str], links: Links, num_bytes: float) -> float:
    """Of a tensor that every rank has a part of: round the ring whole, or there and back in pieces."""
    hops, trip_s, sending_s = len(ranks) - 1, _trip_s(ranks, links), num_bytes / links.bytes_per_s
    return min(hops * (trip_s + sending_s), 2 * hops * trip_s + 2 * sending_s)


def _trip_s(ranks: Sequence[str], links: Links) -> float:
    """One way, over the slowest link of the ring."""
    ends = zip(ranks, [*ranks[1:], ranks[0]], strict=True)
    return max(links.round_trip_s(one, other) for one, other in ends) / 2


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


def _one_prompt(works: Sequence[_Work], size: int, num_tokens: int, num_stages: int) -> Rate:
    """Of a prompt by itself, in chunks of ``size``: one goes all the way, the others come behind it."""
    paced = _in_flight(works, size, size, num_stages, num_stages)
    total = sum(work.seconds for work in works) + (num_tokens / size - 1) * paced.step_s
    return msgspec.structs.replace(paced, tokens_per_s=_per_second(num_tokens, total))


def _per_second(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def stage_time(
    spec: ModelSpec, stage: StageAssignment, kernel: str, speed: Speed, load: StepLoad
) -> StageTime:
    """What a step takes in one stage, without its hops."""
    layers = spec.layers[stage.start : stage.end]
    reading, multiplying, linears = 0.0, 0.0, 0.0
    for layer in layers:
        for num_rows, num_bytes, elements in _parts(layer, kernel, spec.experts_per_token, load.num_rows):
            times = speed.linear_s(num_rows, num_bytes, elements)
            reading, multiplying = reading + times[0], multiplying + times[1]
        linears += _num_linears(layer, spec.experts_per_token, load.num_rows)
    if stage.output:
        elements = spec.vocabulary_rows * spec.hidden_size
        times = speed.linear_s(load.num_outputs, spec.output_bytes(kernel), elements)
        reading, multiplying = reading + times[0], multiplying + times[1]
    cache_bytes = _cache_bytes(spec, stage, kernel, load)
    reading += cache_bytes / (speed.cache_bytes_per_s or speed.read_bytes_per_s)
    multiplying += _attention_flop(spec, stage, load) / (speed.attention_flop_per_s or speed.flop_per_s)
    own = linears / REFERENCE_LINEARS * speed.layer_s + len(layers) * (load.num_rows - 1) * speed.row_s
    return StageTime(reading, multiplying, own + speed.step_s)


def _parts(
    layer: LayerWeights, kernel: str, chosen: int, num_rows: float
) -> list[tuple[float, float, float]]:
    """Rows, bytes and elements: of what every token passes, and of the experts that any goes to."""
    parts = [(num_rows, float(layer.each.num_bytes(kernel)), float(layer.each.elements))]
    reached = layer.reached_share(chosen, num_rows)
    if reached:
        rows_each = num_rows * layer.chosen_share(chosen) / reached
        parts.append((rows_each, layer.experts.num_bytes(kernel) * reached, layer.experts.elements * reached))
    return parts


def _num_linears(layer: LayerWeights, chosen: int, num_rows: float) -> float:
    """How many are called: an expert's as often as it is reached."""
    each, experts = (sum(m.count for m in part.linears) for part in (layer.each, layer.experts))
    return each + experts * layer.reached_share(chosen, num_rows)


def _cache_bytes(spec: ModelSpec, stage: StageAssignment, kernel: str, load: StepLoad) -> float:
    """What decodes read of K/V; states are written too. A chunk reads none that is worth a word."""
    if load.is_chunk:
        return 0.0
    sizes = (
        group.sequence_bytes(stage.start, stage.end, round(load.context), kernel)
        * (2 if group.kind == "recurrent" else 1)
        for group in spec.cache_groups
    )
    return load.num_rows * sum(sizes)


def _attention_flop(spec: ModelSpec, stage: StageAssignment, load: StepLoad) -> float:
    """Of a chunk, over the keys before it and over states; its own keys are in its rows' time."""
    if not load.is_chunk:
        return 0.0
    per_token = sum(
        len([layer for layer in group.layers if stage.start <= layer < stage.end])
        * _per_token(group, load.context)
        for group in spec.cache_groups
    )
    return 2 * load.num_rows * per_token


def _per_token(group: CacheGroup, context: float) -> float:
    """Multiplications of one token in one layer, over all the keys that it sees, or over a state twice."""
    if group.kind == "recurrent":
        return 2.0 * group.state_elements
    if group.kind not in {"kv", "latent", "entries"}:
        return 0.0
    keys = group.retained_tokens(round(context)) / group.stride
    return group.num_heads * (group.head_dim + group.value_dim) * keys


def _assumed(placement: Placement, speeds: Mapping[str, Speed], links: Links) -> list[str]:
    names = [name for name in placement.holders if not speeds[name].measured]
    told = (
        [f"that {', '.join(names)} {'is' if len(names) == 1 else 'are'} as fast as this machine"]
        if names
        else []
    )
    sums = [pair for stage in placement.stages for pair in itertools.pairwise(stage.holders)]
    hops = [(hop.sender, hop.receiver) for hop in _ring(placement)]
    unknown = [
        f"{one} to {other}" for one, other in [*sums, *hops] if frozenset((one, other)) not in links.by_pair
    ]
    if unknown:
        told.append(f"a round trip of {links.otherwise_s * 1000:g} ms: {', '.join(unknown)}")
    if len(placement.holders) > 1:
        told.append(f"wires that carry {links.bytes_per_s / 1e6:g} MB/s")
    return told
