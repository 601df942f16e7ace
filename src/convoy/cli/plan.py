"""``convoy plan``: how a model would be split, from its configuration alone: nothing is loaded or run."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.config import Config, load_config
from convoy.cli.home import config_file
from convoy.cli.member import head_options, load_policy
from convoy.cli.members import LayersFlag, parse_members, spans_by_name
from convoy.cli.output import (
    JsonFlag,
    counted,
    format_bytes,
    print_fields,
    print_json,
    print_note,
    print_table,
)
from convoy.cli.plan_rates import ContextFlag, RoundTripFlag, SpeedFlag, links_of, print_rates, speeds_of
from convoy.cli.quantize import QuantizeFlag, kernel_for
from convoy.errors import ConfigError, PlanError, SpanError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from convoy.plan.blocks import BlockDemand
    from convoy.plan.offer import MemberOffer
    from convoy.plan.placement import Placement
    from convoy.plan.rates import RatesReport
    from convoy.plan.report import BlocksReport, ExcludedReport, PlanReport, RuleReport
    from convoy.plan.spec import ModelSpec
    from convoy.trust.level import Level
    from convoy.trust.policy import Policy

ModelArgument = Annotated[str | None, typer.Argument(help="demo, demo-mini, a directory or synthetic:NAME.")]
MembersFlag = Annotated[
    str | None, typer.Option(help="How many on this machine, or NAME=GB,NAME=GB; the first is the head.")
]
PolicyFlag = Annotated[
    Path | None, typer.Option(help="A policy file with [[placement]] rules.  [default: the config's]")
]
LevelFlag = Annotated[
    list[str] | None,
    typer.Option(help="NAME=LEVEL: suppose that this was proved of a member: none, self_signed, hardware."),
]
ConfigFlag = Annotated[
    Path | None,
    typer.Option(
        help="A convoy.toml: model, roster, spans.  [default: .convoy/convoy.toml, but for --members]"
    ),
]
StandbysFlag = Annotated[
    list[str] | None, typer.Option(help="NAME of a member that holds nothing until another one is lost.")
]


def plan(
    model: ModelArgument = None,
    members: MembersFlag = None,
    layers: LayersFlag = None,
    policy: PolicyFlag = None,
    level: LevelFlag = None,
    config: ConfigFlag = None,
    quantize: QuantizeFlag = None,
    standby: StandbysFlag = None,
    speed: SpeedFlag = None,
    round_trip: RoundTripFlag = None,
    context: ContextFlag = 512,
    as_json: JsonFlag = False,
) -> None:
    """Show who would hold which layers, how fast it would be, and why.

    Also who sees token ids, how much fits, and which rule of a policy excludes whom. Loads nothing, and runs
    no more than a measurement of this machine.
    """
    # Members that were named on the command line are not those of the cluster that this folder may belong to.
    settings = load_config(config_file(config) if members is None else config)
    named = model or settings.model_name()
    if named is None:
        raise UsageError("no model is named", hint="give MODEL, or --config with a [model]")
    demands = load_policy(policy or settings.cluster.policy)
    asked = kernel_for(quantize, settings.model.kernel)
    offers = _with_levels(_offers(settings, members), level or [])
    offers, standbys = _without_standbys(settings, offers, standby or [])
    spans = spans_by_name(layers, [offer.name for offer in offers]) or settings.plan.layers
    offers, left_out = _above(demands.minimum, offers)
    spec = _read_spec(named)  # last, because it takes the seconds that torch takes to load
    kernel, device = _kernel(asked, settings.model.device)
    offers = [dataclasses.replace(offer, kernel=kernel) for offer in offers]
    with _rules_shown(spec, offers, demands, quiet=as_json):
        placement = _place(spec, offers, spans, demands)
    here = _Here.of(settings, members, placement, device)
    rates = _rates(settings, placement, here, context, speed or [], round_trip or [])
    found = _report(settings, placement, left_out, standbys, rates)
    print_json(found) if as_json else _print(found)


def _read_spec(named: str) -> ModelSpec:
    from convoy.model.source import ModelSource

    return ModelSource.resolve(named).spec


def _place(
    spec: ModelSpec, offers: list[MemberOffer], spans: Mapping[str, str] | None, demands: Policy
) -> Placement:
    from convoy.plan.placement import place

    return place(spec, offers, spans, demands.placement)


def _report(
    settings: Config,
    placement: Placement,
    left_out: list[ExcludedReport],
    standbys: list[str],
    rates: RatesReport,
) -> PlanReport:
    from convoy.plan.report import report, report_blocks

    blocks = report_blocks(placement, _demand(settings, placement.spec))
    return report(placement, left_out, standbys=standbys, blocks=blocks, rates=rates)


@dataclasses.dataclass(frozen=True)
class _Here:
    """Which members this machine is, and on what each of them computes here."""

    name: str
    all_members: bool
    num_threads: int
    device: str

    @classmethod
    def of(cls, settings: Config, members: str | None, placement: Placement, device: str) -> _Here:
        """A mere count of members is a cluster on this machine; of those with names the head is on it."""
        elsewhere = settings.cluster.roster is not None if members is None else "=" in members
        name = settings.cluster.name if members is None and elsewhere else None
        sharing = 1 if elsewhere else len(placement.stages)
        num_threads = settings.model.num_threads or max(1, (os.cpu_count() or 1) // sharing)
        return cls(name or placement.head, not elsewhere, num_threads, device)


def _demand(settings: Config, spec: ModelSpec) -> BlockDemand:
    return head_options(settings).demand(block_size=settings.engine.block_size, max_context=spec.max_context)


def _rates(
    settings: Config,
    placement: Placement,
    here: _Here,
    context: int,
    speeds: Sequence[str],
    trips: Sequence[str],
) -> RatesReport:
    from convoy.plan.rates import Workload, predict

    engine = settings.engine
    return predict(
        placement,
        speeds_of(
            placement,
            speeds,
            here.name,
            all_here=here.all_members,
            num_threads=here.num_threads,
            device=here.device,
        ),
        links_of(placement, trips, all_here=here.all_members),
        Workload(min(context, placement.spec.max_context), engine.max_batch, engine.prefill_chunk),
    )


@contextmanager
def _rules_shown(
    spec: ModelSpec, offers: list[MemberOffer], demands: Policy, *, quiet: bool
) -> Iterator[None]:
    """Where no plan comes of it, the rules are shown before the error is."""
    from convoy.plan.report import rule_reports

    try:
        yield
    except (PlanError, SpanError):
        if not quiet:
            print_rules(rule_reports(spec, offers, demands.placement))
        raise


def _kernel(asked: str, device: str) -> tuple[str, str]:
    """What members would run, and on which device of this machine.

    Nothing is proved here: `auto` is taken for CUDA where that is, else for exact mode where that can be, on
    x86-64.
    """
    from convoy.model.device import CUDA_KERNEL, HOST, choose_devices

    chosen = choose_devices(device, asked)[0]
    if chosen != HOST:
        return CUDA_KERNEL, chosen
    if asked != "auto":
        return asked, HOST
    return ("exact-f32" if platform.machine() in {"x86_64", "AMD64"} else "plain-f32"), HOST


def _without_standbys(
    settings: Config, offers: list[MemberOffer], standbys: list[str]
) -> tuple[list[MemberOffer], list[str]]:
    """The members that have a stage from the start, and the names of the others. Raises UsageError."""
    names = [offer.name for offer in offers]
    own = settings.cluster.name
    if settings.cluster.standby and own in names:
        standbys = [*standbys, own]
    for name in standbys:
        if name not in names:
            raise UsageError(f"--standby is {name}, expected a member: {', '.join(names)}")
        if next(offer for offer in offers if offer.name == name).head:
            raise UsageError(f"--standby is {name}, which is the head: it always has a stage")
    waiting = [name for name in names if name in standbys]
    return [offer for offer in offers if offer.name not in waiting], waiting


def _with_levels(offers: list[MemberOffer], levels: list[str]) -> list[MemberOffer]:
    """The offers as if these levels had been proved; a plan asks nobody for evidence. Raises UsageError."""
    from convoy.trust.level import Level

    names = [offer.name for offer in offers]
    supposed: dict[str, Level] = {}
    for text in levels:
        name, equals, word = text.partition("=")
        if not equals or name not in names:
            raise UsageError(f"--level {text} names no member, expected NAME=LEVEL for {', '.join(names)}")
        try:
            supposed[name] = Level.from_text(word)
        except ValueError as error:
            raise UsageError(f"--level {text}: {error}") from None
    return [dataclasses.replace(offer, level=supposed.get(offer.name, offer.level)) for offer in offers]


def _above(minimum: Level, offers: list[MemberOffer]) -> tuple[list[MemberOffer], list[ExcludedReport]]:
    """Those that may have a stage at all: the head, which judges, and peers of at least the minimum."""
    from convoy.plan.report import ExcludedReport

    out = [offer for offer in offers if not offer.head and offer.level < minimum]
    reports = [
        ExcludedReport(
            offer.name,
            offer.level.text,
            f"{offer.name} has {offer.level.text}, and the policy's minimum is {minimum.text}",
        )
        for offer in out
    ]
    return [offer for offer in offers if offer not in out], reports


def _offers(settings: Config, members: str | None) -> list[MemberOffer]:
    """Those of ``--members``, else of the roster, else two. Others' memory is unknown until they answer."""
    from convoy.plan.offer import MemberOffer

    if members is None and settings.cluster.roster is not None:
        names = _roster_names(settings)
        print_note("memory of the other members is unknown: each is taken to have as much as this one")
        return [MemberOffer(name, _memory_bytes(settings), index == 0) for index, name in enumerate(names)]
    listed = parse_members(members or "2")
    share = _memory_bytes(settings) // len(listed)
    return [MemberOffer(name, size or share, index == 0) for index, (name, size) in enumerate(listed)]


def _roster_names(settings: Config) -> list[str]:
    """The roster's members, the head first: this member if it may be head, else the first that may."""
    from convoy.cli.files import read_bytes
    from convoy.trust.roster import MAX_ROSTER_BYTES, open_roster

    data = read_bytes(settings.require_roster(), max_bytes=MAX_ROSTER_BYTES)
    roster = open_roster(data, operator_key=settings.require_operator_key()).roster
    heads = [member.name for member in roster.members if member.head]
    head = settings.cluster.name if settings.cluster.name in heads else heads[0]
    return [head, *(member.name for member in roster.members if member.name != head)]


def _memory_bytes(settings: Config) -> int:
    """What was granted, or what a member would offer of what is free now."""
    import psutil

    from convoy.plan.memory import MEMORY_SHARE

    granted = int(settings.model.memory_gb * 10**9)
    available: int = psutil.virtual_memory().available
    if granted > psutil.virtual_memory().total:
        raise ConfigError(f"[model] memory_gb is {settings.model.memory_gb:g}, more than this machine has")
    return granted or int(available * MEMORY_SHARE)


def _print(found: PlanReport) -> None:
    print_fields(
        [
            ("model", f"{found.model} ({found.family}, {found.num_layers} layers, {found.dtype})"),
            ("route", found.route),
            ("weights", format_bytes(found.weight_bytes)),
            (
                "context",
                f"{found.max_context} tokens; {found.max_kv_tokens} tokens of K/V fit at the tightest member",
            ),
            ("hops", f"{len(found.hops)}, {format_bytes(found.hop_bytes_per_token)} for each decoded token"),
        ]
    )
    print()
    _print_stages(found)
    if found.blocks is not None:
        _print_blocks(found, found.blocks)
    if found.rates is not None:
        print_rates(found.rates)
        print()
    print_rules(found.rules)
    for name in found.standbys:
        print(f"standby: {name} holds nothing until another member is lost")
    for out in found.left_out:
        print(f"no stage: {out.reason}")
    print(f"token ids are seen by: {', '.join(found.token_id_members)}")


def _print_stages(found: PlanReport) -> None:
    print_table(
        ["stage", "member", "span", "weights", "K/V per token", "memory", "sees token ids"],
        [
            (
                index,
                f"{stage.member} (head)" if stage.head else stage.member,
                stage.span,
                format_bytes(stage.weight_bytes),
                format_bytes(stage.kv_bytes_per_token),
                format_bytes(stage.memory_bytes),
                "yes" if stage.sees_token_ids else "no",
            )
            for index, stage in enumerate(found.stages)
        ],
    )
    print()


def _print_blocks(found: PlanReport, blocks: BlocksReport) -> None:
    """A row for each cache group, and which member leaves no room for more."""
    print_table(
        ["cache group", "layers", "K/V blocks", "tokens a block", "memory over all", "of one sequence"],
        [
            (
                group.name,
                group.num_layers,
                group.num_blocks,
                blocks.block_size,
                format_bytes(group.num_blocks * group.block_bytes),
                "as long as it is" if group.ring is None else f"at most {counted(group.ring, 'block')}",
            )
            for group in blocks.groups
        ],
    )
    limit = "as many as are wanted" if blocks.is_all_wanted else f"no more fit on {blocks.tightest}"
    working = max(stage.working_bytes for stage in found.stages)
    print(f"{limit}; beside weights and K/V a step takes up to {format_bytes(working)} of a member")
    print()


def print_rules(rules: list[RuleReport]) -> None:
    """A row for each rule of the policy and each member that it excludes; nothing without rules."""
    if not rules:
        return
    print_table(
        ["rule", "keeps", "on", "satisfied by", "excludes"],
        [
            (
                rule.number,
                rule.keeps,
                rule.on,
                ", ".join(rule.satisfied_by) or "nobody",
                ", ".join(f"{out.member} ({out.level})" for out in rule.excluded) or "nobody",
            )
            for rule in rules
        ],
    )
    print()
