"""A placement as numbers for people and programs: `convoy plan` prints it, with nothing loaded or run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import msgspec

from convoy.config.kernels import AUTO, KV_FORMS, form_of, kv_form
from convoy.errors import ModelError, PlanError
from convoy.plan.memory.blocks import BlockDemand, Room, choose_blocks
from convoy.plan.memory.working import working_bytes
from convoy.plan.offer import MemberOffer
from convoy.plan.placement.placement import Placement
from convoy.plan.placement.rules import breaches, keep_text, place_text, satisfies
from convoy.plan.rates.compare import Compared, TensorReport
from convoy.plan.rates.rates import RatesReport
from convoy.plan.span import Span, format_span
from convoy.plan.spec.model import ModelSpec
from convoy.plan.spec.sharding import rank_spec
from convoy.trust.evidence.policy import PlacementRule
from convoy.wire.messages.control import StageAssignment


class StageReport(msgspec.Struct, frozen=True):
    """Describe one stage and its use of its member's memory; for several ranks, the use of each rank's
    memory.

    ``memory_bytes`` is then the smallest rank's. ``weight_share`` is one rank's share of the stage's weights.
    """

    member: str
    kernel: str
    head: bool
    span: str
    # Half-open, as everywhere but in ``span``.
    start: int
    end: int
    embed: bool
    output: bool
    weight_bytes: int
    kv_bytes_per_token: int
    memory_bytes: int
    # The most that a step takes beside weights and K/V.
    working_bytes: int
    # The longest sequence that fits beside the weights; windows keep their window.
    max_kv_tokens: int
    # The readable source: "tokens" or "activations".
    can_read_prompts: str
    # The members that hold it together, ``member`` first; empty for one member alone.
    ranks: list[str] = []
    weight_share: float = 1.0
    # The dtype of its K/V.
    kv_dtype: str = ""
    # The members that take more than in the form of the file, because they have no compiled code.
    unpacks: list[str] = []


class KvReport(msgspec.Struct, frozen=True):
    """Describe the K/V of a plan in one dtype that every stage can hold, on the same stages."""

    kv_dtype: str
    # Over all members.
    bytes_per_token: int
    # Of the tightest member.
    max_kv_tokens: int


class ParallelReport(msgspec.Struct, frozen=True):
    """Describe how members share the model, and why; ``refused`` has the reasons against other modes."""

    mode: str
    reason: str
    refused: dict[str, str] = {}


class HopReport(msgspec.Struct, frozen=True):
    """Describe one transfer of hidden state; ``bytes_per_token`` before framing and sealing."""

    sender: str
    receiver: str
    boundary: int
    all_rows: bool
    bytes_per_token: int


class ExcludedReport(msgspec.Struct, frozen=True):
    """Name a member that a rule excludes from parts of the model, and its level, which is too low."""

    member: str
    level: str
    reason: str


class RuleReport(msgspec.Struct, frozen=True):
    """Describe a placement rule of the policy and its effect on these members; ``number`` counts from 1."""

    number: int
    keeps: str
    on: str
    satisfied_by: list[str]
    excluded: list[ExcludedReport]


class GroupReport(msgspec.Struct, frozen=True):
    """Describe a cache group and its pool, the same on every member.

    ``ring`` bounds a sequence's blocks, if set.
    """

    name: str
    num_layers: int
    num_blocks: int
    ring: int | None
    # Of one block, over all members.
    block_bytes: int


class BlocksReport(msgspec.Struct, frozen=True):
    """Predict the pools' sizes; ``tightest`` is the member that has no room for more."""

    # In tokens.
    block_size: int
    groups: list[GroupReport]
    tightest: str
    # Whether there are as many as a full batch of full contexts needs.
    is_all_wanted: bool


class PlanReport(msgspec.Struct, frozen=True):
    """Describe a whole plan. ``peers_seeing_token_ids`` is empty in the default layout.

    ``can_read_prompts`` has "tokens", "activations", or "no" for each member; "no" means that it holds no
    layer.
    """

    model: str
    family: str
    dtype: str
    num_layers: int
    max_context: int
    route: str
    stages: list[StageReport]
    hops: list[HopReport]
    token_id_members: list[str]
    peers_seeing_token_ids: list[str]
    can_read_prompts: dict[str, str]
    weight_bytes: int
    kv_bytes_per_token: int
    # Over all hops, for one decoded token.
    hop_bytes_per_token: int
    # Of the tightest member.
    max_kv_tokens: int
    # Those of the policy; all of them hold.
    rules: list[RuleReport] = []
    # Members below the policy's minimum, which get no stage.
    left_out: list[ExcludedReport] = []
    # Members without a stage, which wait for the loss of another.
    standbys: list[str] = []
    blocks: BlocksReport | None = None
    rates: RatesReport | None = None
    parallel: ParallelReport | None = None
    rates_by_mode: dict[str, RatesReport] = {}
    # The cost and the savings of all-reduces, where ranks could share layers.
    tensor: TensorReport | None = None
    # The dtypes of the stages' K/V, and all that they could have.
    kv_dtype: str = ""
    kv_choices: list[KvReport] = []
    # The forms in which stages hold most of their weights, as in "BF16"; ``dtype`` is that of sums and rows.
    weight_form: str = ""


def report(
    placement: Placement,
    left_out: Sequence[ExcludedReport] = (),
    *,
    standbys: Sequence[str] = (),
    blocks: BlocksReport | None = None,
    rates: RatesReport | None = None,
    compared: Compared | None = None,
) -> PlanReport:
    """Return the numbers of a placement, with the members ``left_out`` before it was made.

    ``compared`` holds the other ways to share the model among these members.
    """
    spec, dtype, route = placement.spec, placement.hidden_dtype, placement.route
    stages = [_stage(placement, stage) for stage in placement.stages]
    token_bytes = spec.boundary_bytes(dtype)
    hops = [HopReport(h.sender, h.receiver, h.boundary, h.all_rows, token_bytes) for h in route.hops]
    readers = list(route.token_id_members)
    return PlanReport(
        model=spec.name,
        family=spec.family,
        dtype=" and ".join(sorted({form_of(stage.kernel).dtype for stage in stages})),
        num_layers=spec.num_layers,
        max_context=spec.max_context,
        route=route.describe(),
        stages=stages,
        hops=hops,
        token_id_members=readers,
        peers_seeing_token_ids=[name for name in readers if name != placement.head],
        can_read_prompts=_reads(placement, [*standbys, *(out.member for out in left_out)]),
        weight_bytes=sum(stage.weight_bytes * max(1, len(stage.ranks)) for stage in stages),
        kv_bytes_per_token=_kv_token_bytes(stages),
        hop_bytes_per_token=sum(hop.bytes_per_token for hop in hops),
        max_kv_tokens=min(stage.max_kv_tokens for stage in stages),
        rules=rule_reports(spec, placement.members, placement.rules),
        left_out=list(left_out),
        standbys=list(standbys),
        blocks=blocks,
        rates=rates,
        parallel=ParallelReport(placement.mode, placement.reason, compared.refused if compared else {}),
        rates_by_mode=compared.rates if compared else {},
        tensor=compared.tensor if compared else None,
        kv_dtype=" and ".join(dict.fromkeys(stage.kv_dtype for stage in stages)),
        kv_choices=_kv_choices(placement),
    )


def _kv_token_bytes(stages: Sequence[StageReport]) -> int:
    return sum(stage.kv_bytes_per_token * max(1, len(stage.ranks)) for stage in stages)


def _kv_choices(placement: Placement) -> list[KvReport]:
    """Return the dtypes of K/V that the model and the kernels of all stages allow."""
    found = []
    for asked in KV_FORMS:
        try:
            other = dataclasses.replace(placement, spec=placement.spec.with_kv_dtype(asked))
            stages = [_stage(other, stage) for stage in placement.stages]
        except ModelError:
            continue
        fitting = min(stage.max_kv_tokens for stage in stages)
        found.append(KvReport(asked, _kv_token_bytes(stages), fitting))
    return found


def report_blocks(placement: Placement, demand: BlockDemand) -> BlocksReport:
    """Predict the head's choice of blocks once all members have loaded.

    Raises PlanError if not one of each fits.
    """
    groups = placement.spec.cache_groups
    rooms = {}
    for stage in placement.stages:
        spec, run = rank_spec(placement.spec, stage.world_size), (stage.start, stage.end)
        for name in stage.holders:
            form = placement.forms[name]
            weights = spec.weight_bytes(*run, embed=stage.embed, output=stage.output, dtype=form)
            sizes = [group.block_bytes(*run, demand.block_size, form) for group in spec.cache_groups]
            rooms[name] = Room(placement.memory_bytes[name] - weights, sizes)
    choice = choose_blocks(groups, rooms, demand)
    if not choice.most:
        raise PlanError(
            f"{choice.tightest} has no memory for one K/V block of each group beside its weights",
            hint="give that member fewer layers or more memory, or serve with --quantize q8 or q4",
        )
    sizes = [sum(room.block_bytes[index] for room in rooms.values()) for index in range(len(groups))]
    return BlocksReport(
        block_size=demand.block_size,
        groups=[
            GroupReport(
                group.name,
                len(group.layers),
                count,
                group.ring_blocks(demand.block_size, demand.max_row_tokens),
                size,
            )
            for group, count, size in zip(groups, choice.num_blocks, sizes, strict=True)
        ],
        tightest=choice.tightest,
        is_all_wanted=choice.most >= demand.most,
    )


def rule_reports(
    spec: ModelSpec, members: Sequence[MemberOffer], rules: Sequence[PlacementRule]
) -> list[RuleReport]:
    """Return which rule excludes which members: the same whether or not a placement exists."""
    return [_rule(spec, members, number, rule) for number, rule in enumerate(rules, start=1)]


def _rule(spec: ModelSpec, members: Sequence[MemberOffer], number: int, rule: PlacementRule) -> RuleReport:
    whole = Span(0, spec.num_layers, output=True)
    out = [member for member in members if not satisfies(rule, member)]
    return RuleReport(
        number=number,
        keeps=keep_text(rule, spec.num_layers),
        on=place_text(rule),
        satisfied_by=[member.name for member in members if satisfies(rule, member)],
        excluded=[
            ExcludedReport(member.name, member.level.text, str(breach))
            for member in out
            for breach in breaches(spec, [rule], [(member, whole)], first_number=number)
        ],
    )


def _reads(placement: Placement, idle: Iterable[str]) -> dict[str, str]:
    """Return the source from which each member can read prompts; ``idle`` members have no offer in the
    placement.
    """
    route = placement.route
    offered = (one.name for member in placement.members for one in member.each)
    return {name: route.reads_prompts(name) for name in (*placement.holders, *offered, *idle)}


def _stage(placement: Placement, stage: StageAssignment) -> StageReport:
    kernel, form = placement.kernels[stage.member], placement.stage_form(stage)
    spec = rank_spec(placement.spec, stage.world_size)
    weights, whole = (
        one.weight_bytes(stage.start, stage.end, embed=stage.embed, output=stage.output, dtype=form)
        for one in (spec, placement.spec)
    )
    kv_bytes = spec.kv_token_bytes(stage.start, stage.end, form)
    memory_bytes = min(placement.memory_bytes[name] for name in stage.holders)
    return StageReport(
        member=stage.member,
        kernel=kernel,
        head=stage.member == placement.head,
        span=format_span(Span(stage.start, stage.end, stage.output), spec.num_layers),
        start=stage.start,
        end=stage.end,
        embed=stage.embed,
        output=stage.output,
        weight_bytes=weights,
        kv_bytes_per_token=kv_bytes,
        memory_bytes=memory_bytes,
        working_bytes=working_bytes(spec, stage.start, stage.end, output=stage.output),
        max_kv_tokens=_kv_tokens(spec, stage, memory_bytes - weights, form),
        can_read_prompts=placement.route.reads_prompts(stage.member),
        ranks=list(stage.ranks),
        weight_share=weights / whole,
        kv_dtype=_kv_dtype(placement.spec, kernel),
        unpacks=[name for name in stage.holders if placement.unpacks(stage, name)],
    )


def _kv_dtype(spec: ModelSpec, kernel: str) -> str:
    """Return the dtype of keys and values, or that of states where a model has no others."""
    asked = next((group.kv_dtype for group in spec.cache_groups if group.attends), AUTO)
    return kv_form(kernel, asked).name


def _kv_tokens(spec: ModelSpec, stage: StageAssignment, room_bytes: int, dtype: str) -> int:
    """Return the longest sequence that ``room_bytes`` hold; at most a context where K/V stops growing."""
    growing = sum(
        group.token_bytes(stage.start, stage.end, dtype)
        for group in spec.cache_groups
        if group.window is None
    )
    low, high = 0, max(0, room_bytes) // growing if growing else spec.max_context
    while low < high:
        middle = (low + high + 1) // 2
        fits = spec.kv_bytes(stage.start, stage.end, middle, dtype) <= room_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    return low
