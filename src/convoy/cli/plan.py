"""``convoy plan``: show how a model would be split, from its configuration alone. It loads no weights."""

from __future__ import annotations

import dataclasses
import functools
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convoy.cli.checks.plan_print import print_plan, print_rules
from convoy.cli.checks.rates import (
    ContextFlag,
    Here,
    RoundTripFlag,
    SpeedFlag,
    ThreadsFlag,
    links_of,
    speeds_of,
)
from convoy.cli.flags.quantize import QuantizeFlag, kernel_for
from convoy.cli.flags.steps import with_step_flags
from convoy.cli.flags.table import option
from convoy.cli.local.members import LayersFlag, parse_members, spans_by_name
from convoy.cli.operator.home import config_file
from convoy.cli.running.member import default_cache, head_options, load_policy
from convoy.cli.show.output import JsonFlag, format_bytes, print_json, print_note
from convoy.config.settings import Config, load_config, override
from convoy.errors import ConfigError, PlanError, SpanError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from convoy.plan.memory.blocks import BlockDemand
    from convoy.plan.offer import MemberOffer
    from convoy.plan.placement.placement import Placement
    from convoy.plan.placement.ways import Ways
    from convoy.plan.rates.compare import Compared
    from convoy.plan.rates.rates import Links, Workload
    from convoy.plan.report import ExcludedReport, PlanReport
    from convoy.plan.spec.model import ModelSpec
    from convoy.plan.speed import Speed
    from convoy.trust.evidence.level import Level
    from convoy.trust.evidence.policy import Policy

_REMEDY = "--level beta=hardware"

ModelArgument = Annotated[str | None, typer.Argument(help="demo, demo-mini, a directory or synthetic:NAME.")]
MembersFlag = Annotated[
    str | None, typer.Option(help="A number of members here, or NAME=GB,NAME=GB; the first is the head.")
]
PolicyFlag = Annotated[Path | None, option("cluster", "policy")]
LevelFlag = Annotated[
    list[str] | None,
    typer.Option(help="NAME=LEVEL: assume that a member proved this level: none, self_signed, hardware."),
]
ConfigFlag = Annotated[
    Path | None,
    typer.Option(
        help="A convoy.toml: model, roster, spans.  [default: .convoy/convoy.toml, but for --members]"
    ),
]
StandbysFlag = Annotated[
    list[str] | None, typer.Option(help="NAME of a member that holds no layers until another member is lost.")
]
_HOST = "cpu"


@with_step_flags
def plan(
    *,
    model: ModelArgument = None,
    members: MembersFlag = None,
    layers: LayersFlag = None,
    sharing: dict[str, Any],
    policy: PolicyFlag = None,
    level: LevelFlag = None,
    config: ConfigFlag = None,
    quantize: QuantizeFlag = None,
    standby: StandbysFlag = None,
    speed: SpeedFlag = None,
    round_trip: RoundTripFlag = None,
    context: ContextFlag = 512,
    threads: ThreadsFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Show which member would hold which layers, how fast, and why.

    Also show which members can read prompts, how much fits, and which members a rule of a policy excludes.
    Loads no weights; runs at most a measurement of this machine.
    """
    # Members that the command line names are not the members of this folder's cluster.
    settings = load_config(config_file(config) if members is None else config)
    settings = override(settings, plan=override(settings.plan, **sharing))
    head_options(settings).check()
    named = model or settings.model_name()
    if named is None:
        raise UsageError("no model is named", hint="give MODEL, or --config with a [model]")
    demands = load_policy(policy or settings.cluster.policy)
    asked = kernel_for(quantize, settings.model.kernel)
    offers = _with_levels(_offers(settings, members), level or [])
    demands.check_members([offer.name for offer in offers])
    # The policy comes before the placement: memory beyond its cap must not attract layers.
    offers = _capped(offers, demands)
    offers, standbys = _without_standbys(settings, offers, standby or [])
    spans = spans_by_name(layers, [offer.name for offer in offers]) or settings.plan.layers
    offers, left_out = _above(demands.minimum, offers)
    # Last, because it loads torch, which takes seconds.
    spec = _read_spec(named)
    head_options(settings).check_context(spec)
    kernel, device = _kernel(asked, settings.model.device)
    offers = [dataclasses.replace(offer, kernel=kernel) for offer in offers]
    here = Here.of(settings, members, offers, device, threads)
    paces = _Paces(settings, offers, here, context, speed or [], round_trip or [])
    with _rules_shown(spec, offers, demands, quiet=as_json):
        ways, placement = _choose(settings, spec, offers, spans, demands, paces)
    found = _report(settings, placement, left_out, standbys, paces.compare(ways))
    print_json(found) if as_json else print_plan(found)


def _read_spec(named: str) -> ModelSpec:
    from convoy.model.checkpoints.source import ModelSource

    return ModelSource.resolve(named).spec


def _choose(
    settings: Config,
    spec: ModelSpec,
    offers: list[MemberOffer],
    spans: Mapping[str, str] | None,
    demands: Policy,
    paces: _Paces,
) -> tuple[Ways, Placement]:
    from convoy.plan.placement.ways import choose_way, find_ways

    ways = find_ways(spec, offers, spans, demands.placement, ranks=settings.plan.ranks)
    return ways, choose_way(settings.plan.parallel, ways, predict=paces.step_s)


def _report(
    settings: Config,
    placement: Placement,
    left_out: list[ExcludedReport],
    standbys: list[str],
    compared: Compared,
) -> PlanReport:
    from convoy.plan.report import report, report_blocks

    blocks = report_blocks(placement, _demand(settings, placement))
    rates = compared.rates[placement.mode]
    return report(placement, left_out, standbys=standbys, blocks=blocks, rates=rates, compared=compared)


def _demand(settings: Config, placement: Placement) -> BlockDemand:
    options = head_options(settings).for_kernels(placement.kernels[name] for name in placement.holders)
    max_context = options.max_context or placement.spec.max_context
    return options.demand(block_size=settings.engine.block_size, max_context=max_context)


@dataclasses.dataclass(frozen=True)
class _Paces:
    """Predict rates of plans. Measures this machine when the first rate is needed, after a plan was found."""

    settings: Config
    offers: list[MemberOffer]
    here: Here
    context: int
    speed_flags: Sequence[str]
    trip_flags: Sequence[str]

    @functools.cached_property
    def speeds(self) -> dict[str, Speed]:
        cache = self.settings.model.cache or default_cache()
        return speeds_of(self.offers, self.speed_flags, self.here, cache)

    @functools.cached_property
    def links(self) -> Links:
        return links_of(self.offers, self.trip_flags, self.here)

    def step_s(self, placement: Placement) -> float:
        """Return the seconds of a decode step of one sequence."""
        from convoy.plan.rates.rates import predict

        return predict(placement, self.speeds, self.links, self._workload(placement.spec)).decode.step_s

    def compare(self, ways: Ways) -> Compared:
        from convoy.plan.rates.compare import compare

        return compare(ways, self.speeds, self.links, self._workload(ways.spec))

    def _workload(self, spec: ModelSpec) -> Workload:
        from convoy.plan.rates.rates import Workload

        options = head_options(self.settings).for_kernels(offer.kernel for offer in self.offers)
        return Workload(min(self.context, spec.max_context), options.max_batch, options.chunk_tokens)


@contextmanager
def _rules_shown(
    spec: ModelSpec, offers: list[MemberOffer], demands: Policy, *, quiet: bool
) -> Iterator[None]:
    """Print the rules of the policy if the block finds no plan, before the error is reported."""
    from convoy.plan.report import rule_reports

    try:
        yield
    except (PlanError, SpanError):
        if not quiet:
            print_rules(rule_reports(spec, offers, demands.placement))
        raise


def _kernel(asked: str, device: str) -> tuple[str, str]:
    """Return the kernel that members would run, and the device of this machine.

    This proves nothing: `auto` counts as CUDA where there is CUDA, otherwise as exact mode on x86-64.
    """
    # Skips the second that torch takes to load.
    if device == _HOST:
        chosen = _HOST
    else:
        from convoy.model.device import choose_devices, kernel_on_cuda

        chosen = choose_devices(device, asked)[0]
        if chosen != _HOST:
            return kernel_on_cuda(asked), chosen
    if asked != "auto":
        return asked, _HOST
    return ("exact-f32" if platform.machine() in {"x86_64", "AMD64"} else "plain-f32"), _HOST


def _without_standbys(
    settings: Config, offers: list[MemberOffer], standbys: list[str]
) -> tuple[list[MemberOffer], list[str]]:
    """Return the members with a stage from the start, and the names of the standbys. Raises UsageError."""
    names = [offer.name for offer in offers]
    own = settings.cluster.name
    if settings.cluster.standby and own in names:
        standbys = [*standbys, own]
    for name in standbys:
        if name not in names:
            raise UsageError(f"--standby is {name}, expected a member: {', '.join(names)}")
        if next(offer for offer in offers if offer.name == name).head:
            raise UsageError(
                f"--standby is {name}, which is the head: it always has a stage",
                hint="leave this --standby out",
            )
    waiting = [name for name in names if name in standbys]
    return [offer for offer in offers if offer.name not in waiting], waiting


def _with_levels(offers: list[MemberOffer], levels: list[str]) -> list[MemberOffer]:
    """Return the offers with the levels of ``--level``. A plan asks no member for evidence. Raises
    UsageError.
    """
    from convoy.trust.evidence.level import Level

    names = [offer.name for offer in offers]
    supposed: dict[str, Level] = {}
    for text in levels:
        name, equals, word = text.partition("=")
        if not equals or name not in names:
            raise UsageError(
                f"--level {text} names no member, expected NAME=LEVEL for {', '.join(names)}", hint=_REMEDY
            )
        try:
            supposed[name] = Level.from_text(word)
        except ValueError as error:
            raise UsageError(f"--level {text}: {error}", hint=_REMEDY) from None
    return [dataclasses.replace(offer, level=supposed.get(offer.name, offer.level)) for offer in offers]


def _capped(offers: list[MemberOffer], demands: Policy) -> list[MemberOffer]:
    """Return the offers with at most the memory that the policy allows."""
    found = []
    for offer in offers:
        counted = demands.capped(offer.name, offer.memory_bytes, head=offer.head)
        if counted < offer.memory_bytes:
            offered = format_bytes(offer.memory_bytes)
            print_note(f"{offer.name} offers {offered}, and the policy lets {format_bytes(counted)} count")
        found.append(dataclasses.replace(offer, memory_bytes=counted))
    return found


def _above(minimum: Level, offers: list[MemberOffer]) -> tuple[list[MemberOffer], list[ExcludedReport]]:
    """Return the members that may have a stage, and a report on each excluded peer.

    The head always may, because it is the judge. A peer needs at least the minimum level.
    """
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
    """Return the members of ``--members``, otherwise of the roster, otherwise two.

    The memory of other members is unknown before they answer.
    """
    from convoy.plan.offer import MemberOffer

    if members is None and settings.cluster.roster is not None:
        names = _roster_names(settings)
        print_note("memory of the other members is unknown: each is assumed to have as much as this one")
        return [MemberOffer(name, _memory_bytes(settings), index == 0) for index, name in enumerate(names)]
    listed = parse_members(members or "2")
    share = _memory_bytes(settings) // len(listed)
    return [MemberOffer(name, size or share, index == 0) for index, (name, size) in enumerate(listed)]


def _roster_names(settings: Config) -> list[str]:
    """Return the names in the roster, head first.

    The head is this member if the roster allows it, otherwise the first member that may be head.
    """
    from convoy.cli.show.files import read_bytes
    from convoy.trust.roster.roster import MAX_ROSTER_BYTES, open_roster

    data = read_bytes(settings.require_roster(), max_bytes=MAX_ROSTER_BYTES)
    roster = open_roster(data, operator_key=settings.require_operator_key()).roster
    heads = [member.name for member in roster.members if member.head]
    head = settings.cluster.name if settings.cluster.name in heads else heads[0]
    return [head, *(member.name for member in roster.members if member.name != head)]


def _memory_bytes(settings: Config) -> int:
    """Return the memory granted in [model], or the share of free memory that a member would offer."""
    import psutil

    from convoy.plan.memory.memory import MEMORY_SHARE

    granted = int(settings.model.memory_gb * 10**9)
    available: int = psutil.virtual_memory().available
    if granted > psutil.virtual_memory().total:
        raise ConfigError(
            f"[model] memory_gb is {settings.model.memory_gb:g}, more than this machine has",
            hint="lower memory_gb, or leave it out: then the free memory counts",
        )
    return granted or int(available * MEMORY_SHARE)
