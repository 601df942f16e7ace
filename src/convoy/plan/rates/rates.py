"""Predict the tokens per second of a placement, and their limit, from speeds and round trips.

A stage's time is the sum of four parts. They are: reading the weights that the step passes, multiplying for
longer than that, looking back on K/V, and each layer's own time, however little there is to do. A hop takes
half of a round trip, plus the wire's time for the bytes.

A card that holds the whole model is fed: the engine submits the next step before the host has the tokens of
this one, so the longer of the card's time and the host's counts. On other cards both are added.

One sequence passes everything in turn. With as many micro-batches in flight as stages, the slowest stage sets
the pace; or the way round the ring does, if it takes longer than all of them. Of a prompt, the first chunk
finds the stages behind it idle, and the last chunk the stages before it. Scheduling, sampling and text are
not counted. Members of one machine are assumed not to slow each other down.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from convoy.config.table import HOST_BATCH, HOST_CHUNK
from convoy.plan.placement.placement import Placement
from convoy.plan.placement.route import Hop
from convoy.plan.spec.cache import CacheGroup
from convoy.plan.spec.model import ModelSpec
from convoy.plan.spec.sharding import rank_spec
from convoy.plan.spec.weights import LayerWeights
from convoy.plan.speed import REFERENCE_LINEARS, Speed
from convoy.wire.messages.control import StageAssignment

# Parts of sums are float32.
_PARTIAL_BYTES = 4


@dataclass(frozen=True)
class Links:
    """Hold round trips in seconds: by pair of members where measured, else ``otherwise_s``."""

    otherwise_s: float
    # Of each wire: a gigabit, sealed; one token sends little.
    bytes_per_s: float = 100e6
    by_pair: Mapping[frozenset[str], float] = field(default_factory=dict)
    # The pairs on one machine, and their round trip where none was measured.
    near: frozenset[frozenset[str]] = frozenset()
    near_s: float = 0.0

    def round_trip_s(self, one: str, other: str) -> float:
        pair = frozenset((one, other))
        return self.by_pair.get(pair, self.near_s if pair in self.near else self.otherwise_s)


@dataclass(frozen=True)
class Workload:
    """Describe the load: decodes of sequences of ``context`` tokens, and prompts as long, in chunks."""

    context: int = 512
    batch: int = HOST_BATCH
    chunk: int = HOST_CHUNK


@dataclass(frozen=True)
class StepLoad:
    """Describe one step: decodes, or a chunk of one prompt, that look back on ``context`` tokens each."""

    # Of hidden states.
    num_rows: float
    context: float
    is_chunk: bool = False
    # Whether a step before this one may compute while the host prepares this one.
    follows: bool = True

    @property
    def num_outputs(self) -> float:
        return 1 if self.is_chunk else self.num_rows


class Rate(msgspec.Struct, frozen=True):
    """Hold a predicted rate.

    ``limit`` names the part to make faster; ``step_s`` is the time between two steps.
    """

    tokens_per_s: float
    step_s: float
    batch: int
    limit: str


class RatesReport(msgspec.Struct, frozen=True):
    """Hold the rates of a placement. ``assumed`` lists the values that were not measured, in words."""

    context: int
    # One sequence.
    decode: Rate
    decode_batch: Rate
    # One prompt of ``context`` tokens, ``batch`` of them in a chunk.
    prefill: Rate
    assumed: list[str]


@dataclass(frozen=True)
class StageTime:
    """Hold the seconds of one stage for a step, by cause; of several ranks, those of the slowest."""

    reading_s: float
    # Beyond the time of reading.
    multiplying_s: float
    # Of Python and the starts of operations.
    layers_s: float
    # Waits of ranks for each other's parts of sums.
    summing_s: float = 0.0
    # Waits of a card for its host.
    waiting_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.reading_s + self.multiplying_s + self.layers_s + self.summing_s + self.waiting_s

    @property
    def limit(self) -> str:
        parts = {
            "memory bandwidth": self.reading_s,
            "matrix products": self.multiplying_s,
            "own time for each layer": self.layers_s,
            "sums over links": self.summing_s,
            "host that prepares steps": self.waiting_s,
        }
        return max(parts, key=lambda what: parts[what])


@dataclass(frozen=True)
class _Work:
    """Hold the time of one stage or hop for a step, and its owner in words."""

    seconds: float
    limit: str


def predict(
    placement: Placement, speeds: Mapping[str, Speed], links: Links, workload: Workload
) -> RatesReport:
    """Return the rates of a placement; ``speeds`` has every member with a stage, or a slice of one."""
    num_stages = len(placement.stages)
    lone = _works(placement, speeds, links, StepLoad(1, workload.context))
    in_flight = min(num_stages, workload.batch)
    shared = workload.batch / in_flight
    micro = _works(placement, speeds, links, StepLoad(shared, workload.context))
    size = min(workload.chunk, workload.context)
    # Tokens before a chunk in the middle of the prompt.
    behind = (workload.context - size) / 2
    chunk = StepLoad(size, behind, is_chunk=True)
    first = _works(placement, speeds, links, replace(chunk, follows=False))
    return RatesReport(
        context=workload.context,
        decode=_in_turn(lone),
        decode_batch=_in_flight(micro, shared, workload.batch, num_stages, in_flight),
        prefill=_one_prompt(
            first, _works(placement, speeds, links, chunk), size, workload.context, num_stages
        ),
        assumed=_assumed(placement, speeds, links),
    )


def _works(placement: Placement, speeds: Mapping[str, Speed], links: Links, load: StepLoad) -> list[_Work]:
    """Return the times of every stage, then of every hop."""
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
    """Return the time of the slowest rank, because the others wait for it at every sum."""
    spec = rank_spec(placement.spec, stage.world_size)
    times = [stage_time(spec, stage, placement.forms[name], speeds[name], load) for name in stage.holders]
    slowest = max(times, key=lambda time: time.total_s)
    return replace(slowest, summing_s=summing_s(placement.spec, stage, links, load))


def summing_s(spec: ModelSpec, stage: StageAssignment, links: Links, load: StepLoad) -> float:
    """Return the seconds in which ranks of a stage exchange a step's sums, and at its end the logits."""
    if stage.world_size == 1:
        return 0.0
    row_bytes = spec.hidden_size * _PARTIAL_BYTES
    total = num_all_reduces(stage) * all_reduce_s(stage.holders, links, load.num_rows * row_bytes)
    if stage.output:
        logits = load.num_outputs * spec.vocab_size * _PARTIAL_BYTES
        total += _trip_s(stage.holders, links) + logits / links.bytes_per_s
    return total


def num_all_reduces(stage: StageAssignment) -> int:
    """Return a step's all-reduces: after attention and MLP of each layer, and for the embedding."""
    return 2 * (stage.end - stage.start) + stage.embed


def all_reduce_s(ranks: Sequence[str], links: Links, num_bytes: float) -> float:
    """Return the seconds of an all-reduce: the faster of whole round the ring, or there and back."""
    hops, trip_s, sending_s = len(ranks) - 1, _trip_s(ranks, links), num_bytes / links.bytes_per_s
    return min(hops * (trip_s + sending_s), 2 * hops * trip_s + 2 * sending_s)


def _trip_s(ranks: Sequence[str], links: Links) -> float:
    """Return the seconds one way, over the slowest link of the ring."""
    ends = zip(ranks, [*ranks[1:], ranks[0]], strict=True)
    return max(links.round_trip_s(one, other) for one, other in ends) / 2


def _ring(placement: Placement) -> list[Hop]:
    """Return the hops of the route; if the last stage has the output too, its tokens go back to the head."""
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
    """Return the rate of steps of ``each`` tokens, with ``in_flight`` at once; ``batch`` is only reported."""
    slowest = max(works[:num_stages], key=lambda work: work.seconds)
    step, limit = slowest.seconds, slowest.limit
    between = sum(work.seconds for work in works) / in_flight
    # Steps wait for their way round the ring, not for each other.
    if between > step:
        step, limit = between, max(works, key=lambda work: work.seconds).limit
    return Rate(_per_second(each, step), step, batch, limit)


def _one_prompt(
    first: Sequence[_Work], others: Sequence[_Work], size: int, num_tokens: int, num_stages: int
) -> Rate:
    """Return the rate of a lone prompt in chunks of ``size``: one goes all the way, the others follow."""
    paced = _in_flight(others, size, size, num_stages, num_stages)
    total = sum(work.seconds for work in first) + (num_tokens / size - 1) * paced.step_s
    return msgspec.structs.replace(paced, tokens_per_s=_per_second(num_tokens, total))


def _per_second(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def stage_time(spec: ModelSpec, stage: StageAssignment, form: str, speed: Speed, load: StepLoad) -> StageTime:
    """Return the time of a step in one stage, without its hops."""
    layers = spec.layers[stage.start : stage.end]
    reading, multiplying, linears = 0.0, 0.0, 0.0
    for layer in layers:
        for num_rows, num_bytes, elements in _parts(layer, form, spec.experts_per_token, load.num_rows):
            times = speed.linear_s(num_rows, num_bytes, elements)
            reading, multiplying = reading + times[0], multiplying + times[1]
        linears += _num_linears(layer, spec.experts_per_token, load.num_rows)
    if stage.output:
        elements = spec.vocabulary_rows * spec.hidden_size
        times = speed.linear_s(load.num_outputs, spec.output_bytes(form), elements)
        reading, multiplying = reading + times[0], multiplying + times[1]
    cache_bytes = _cache_bytes(spec, stage, form, load)
    reading += cache_bytes / (speed.cache_bytes_per_s or speed.read_bytes_per_s)
    multiplying += _attention_flop(spec, stage, load) / (speed.attention_flop_per_s or speed.flop_per_s)
    own = linears / REFERENCE_LINEARS * speed.layer_s
    if not speed.starts_s:
        own += len(layers) * (load.num_rows - 1) * speed.row_s + speed.step_s
        return StageTime(reading, multiplying, own)
    if load.is_chunk:
        # These operations are among those that the host starts.
        own = 0.0
    feeds = load.follows and _feeds(spec, stage)
    waiting = _waiting_s(speed, len(layers), load, reading + multiplying + own, feeds=feeds)
    return StageTime(reading, multiplying, own, waiting_s=waiting)


def _feeds(spec: ModelSpec, stage: StageAssignment) -> bool:
    """Return whether the engine submits a step to this card before the host has the tokens of the last one.

    The card holds the whole model, and its K/V can be taken back: no windows and no states.
    """
    is_whole = stage.embed and stage.output and stage.end - stage.start == spec.num_layers
    rewinds = all(
        group.window is None and group.stride == 1 and not group.is_state for group in spec.cache_groups
    )
    return is_whole and stage.world_size == 1 and rewinds


def _waiting_s(speed: Speed, num_layers: int, load: StepLoad, computing_s: float, *, feeds: bool) -> float:
    """Return the seconds of a step in which a card waits for its host, if it computes for ``computing_s``.

    The host prepares a step, and of a chunk it starts the operations of each layer while the card computes.
    A card that is fed computes while the host prepares, too.
    """
    starting_s = num_layers * speed.starts_s if load.is_chunk else 0.0
    preparing_s = speed.step_s + (0.0 if load.is_chunk else (load.num_rows - 1) * speed.row_s)
    if feeds:
        return max(0.0, preparing_s + starting_s - computing_s)
    return preparing_s + max(0.0, starting_s - computing_s)


def _parts(layer: LayerWeights, form: str, chosen: int, num_rows: float) -> list[tuple[float, float, float]]:
    """Return rows, bytes and elements of the weights for every token, and of the experts reached."""
    parts = [(num_rows, float(layer.each.num_bytes(form)), float(layer.each.elements))]
    reached = layer.reached_share(chosen, num_rows)
    if reached:
        rows_each = num_rows * layer.chosen_share(chosen) / reached
        parts.append((rows_each, layer.experts.num_bytes(form) * reached, layer.experts.elements * reached))
    return parts


def _num_linears(layer: LayerWeights, chosen: int, num_rows: float) -> float:
    """Return how many linears are called: those of an expert as often as it is reached."""
    each, experts = (sum(m.count for m in part.linears) for part in (layer.each, layer.experts))
    return each + experts * layer.reached_share(chosen, num_rows)


def _cache_bytes(spec: ModelSpec, stage: StageAssignment, form: str, load: StepLoad) -> float:
    """Return the bytes of K/V that decodes read; states are also written. A chunk's reads are negligible."""
    if load.is_chunk:
        return 0.0
    sizes = (
        group.sequence_bytes(stage.start, stage.end, round(load.context), form) * (2 if group.is_state else 1)
        for group in spec.cache_groups
    )
    return load.num_rows * sum(sizes)


def _attention_flop(spec: ModelSpec, stage: StageAssignment, load: StepLoad) -> float:
    """Return a chunk's products with earlier keys and with states; its own keys are in its rows' time."""
    if not load.is_chunk:
        return 0.0
    per_token = sum(
        len([layer for layer in group.layers if stage.start <= layer < stage.end])
        * _per_token(group, load.context)
        for group in spec.cache_groups
    )
    return 2 * load.num_rows * per_token


def _per_token(group: CacheGroup, context: float) -> float:
    """Return the multiplications of a token in one layer, over all its keys, or over a state twice."""
    if group.is_state:
        return 2.0 * group.state_elements
    if not group.has_keys:
        return 0.0
    keys = group.retained_tokens(round(context)) / group.stride
    return group.num_heads * (group.head_dim + group.value_dim) * keys


def _assumed(placement: Placement, speeds: Mapping[str, Speed], links: Links) -> list[str]:
    told = []
    for text in dict.fromkeys(speeds[name].assumed for name in placement.holders if speeds[name].assumed):
        names = [name for name in placement.holders if speeds[name].assumed == text]
        told.append(f"that {', '.join(names)} {'is' if len(names) == 1 else 'are'} {text}")
    sums = [pair for stage in placement.stages for pair in itertools.pairwise(stage.holders)]
    hops = [(hop.sender, hop.receiver) for hop in _ring(placement)]
    unknown: dict[float, list[str]] = {}
    for one, other in [*sums, *hops]:
        if frozenset((one, other)) not in links.by_pair:
            unknown.setdefault(links.round_trip_s(one, other), []).append(f"{one} to {other}")
    told += [f"a round trip of {trip_s * 1000:g} ms: {', '.join(ways)}" for trip_s, ways in unknown.items()]
    if len(placement.holders) > 1:
        told.append(f"wires that carry {links.bytes_per_s / 1e6:g} MB/s")
    return told
