"""Plan a model over members from its configuration alone: the core of ``convoy plan`` and `convoy.plan`."""

from __future__ import annotations

import dataclasses
import functools
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from convoy.config.files import default_cache, read_bytes
from convoy.config.kernels import EXACT, PLAIN, held_form, kv_form
from convoy.config.settings import Config, load_config, override
from convoy.errors import ConfigError, ModelError, PlanError, SpanError, UsageError
from convoy.sdk.names import local_names, spans_by_name
from convoy.sdk.options import Note, head_options, load_policy, unheard
from convoy.sdk.speeds import Here, links_of, speeds_of

if TYPE_CHECKING:
    from convoy.plan.memory.blocks import BlockDemand
    from convoy.plan.offer import MemberOffer
    from convoy.plan.placement.modes import ModePlacements
    from convoy.plan.placement.placement import Placement
    from convoy.plan.rates.compare import Compared
    from convoy.plan.rates.rates import Links, Workload
    from convoy.plan.report import ExcludedReport, PlanReport, RuleReport
    from convoy.plan.spec.model import ModelSpec
    from convoy.plan.speed import Speed
    from convoy.trust.evidence.level import Level
    from convoy.trust.evidence.policy import Policy

# Names with bytes; None shares out this machine's memory.
Members = tuple[tuple[str, int | None], ...]
_HOST = "cpu"

_REMEDY = "--level beta=hardware"


@dataclasses.dataclass(frozen=True)
class PlanQuestion:
    """Hold the inputs of a plan.

    ``members`` None takes the roster of the settings, otherwise two members here. ``layers``, ``levels``,
    ``speeds`` and ``round_trips`` are texts as the flags of ``convoy plan`` take them. ``measured`` False
    predicts no rates, and measures nothing. ``on_refused`` gets the rules if they allow no plan.
    """

    settings: Config
    model: str | None = None
    members: Members | None = None
    layers: Sequence[str] | None = None
    policy: Path | None = None
    levels: Sequence[str] = ()
    kernel: str = "auto"
    standbys: Sequence[str] = ()
    speeds: Sequence[str] = ()
    round_trips: Sequence[str] = ()
    context: int = 512
    threads: int | None = None
    measured: bool = True
    note: Note = unheard
    on_refused: Callable[[list[RuleReport]], None] = lambda _rules: None


def plan(
    model: str | None = None,
    *,
    members: int | Mapping[str, float] | None = None,
    config: str | Path | None = None,
    layers: Sequence[str] | None = None,
    standbys: Sequence[str] = (),
    kernel: str | None = None,
    kv_dtype: str | None = None,
    context: int = 512,
    measure: bool = True,
) -> PlanReport:
    """Return which member would hold which layers, how fast, and why. Nothing is loaded or started.

    ``members`` is a number of members on this machine, or names with the GB of each; the first is the head.
    Without it, the roster of ``config`` (a convoy.toml) counts, otherwise two members here. ``layers`` are
    spans, as ``convoy plan --layers`` takes them. ``kv_dtype`` is that of K/V: auto, f32, bf16, f16, q8 or
    fp8. ``context`` is the length in tokens that the rates are for. With ``measure`` False there are no
    rates; otherwise this machine is measured, once, in a few seconds.

    Raises `PlanError` or `SpanError` if no plan fits, and `InputError` for wrong values.
    """
    settings = load_config(None if config is None else Path(config))
    settings = override(settings, engine=override(settings.engine, kv_dtype=kv_dtype))
    return make_plan(
        PlanQuestion(
            settings,
            model,
            None if members is None else _named(members),
            layers,
            kernel=kernel or settings.model.wanted_kernel,
            standbys=standbys,
            context=context,
            measured=measure,
        )
    )


def _named(members: int | Mapping[str, float]) -> Members:
    if isinstance(members, int):
        return tuple((name, None) for name in local_names(members))
    return tuple((name, int(size_gb * 1e9)) for name, size_gb in members.items())


def make_plan(question: PlanQuestion) -> PlanReport:
    """Return the plan. Raises what `plan` raises."""
    settings, note = question.settings, question.note
    head_options(settings).check()
    named = question.model or settings.model_name()
    if named is None:
        raise UsageError("no model is named", hint="give MODEL, or --config with a [model]")
    demands = load_policy(question.policy or settings.cluster.policy)
    offers = _with_levels(_offers(settings, question.members, note), question.levels)
    demands.check_members([offer.name for offer in offers])
    # The policy comes before the placement: memory beyond its cap must not attract layers.
    offers = _capped(offers, demands, note)
    offers, standbys = _without_standbys(settings, offers, list(question.standbys))
    spans = spans_by_name(question.layers, [offer.name for offer in offers]) or settings.plan.layers
    offers, left_out = _above(demands.minimum, offers)
    # Last, because it loads torch, which takes seconds.
    spec = _read_spec(named)
    head_options(settings).check_context(spec)
    kernel, device = _kernel(question.kernel, settings.model.device)
    kv_form(kernel, settings.engine.kv_dtype)
    spec = spec.with_kv_dtype(settings.engine.kv_dtype)
    unpacks = _unpacks(spec, kernel)
    offers = [dataclasses.replace(offer, kernel=kernel, unpacks=unpacks) for offer in offers]
    here = Here.of(settings, question.members, offers, device, question.threads)
    paces = _Paces(settings, offers, here, question.context, question.speeds, question.round_trips, note)
    predict = paces.step_s if question.measured else None
    modes, placement = _choose(question, spec, offers, spans, demands, predict=predict)
    compared = paces.compare(modes) if question.measured else None
    return _report(settings, placement, left_out, standbys, compared)


def _choose(
    question: PlanQuestion,
    spec: ModelSpec,
    offers: list[MemberOffer],
    spans: Mapping[str, str] | None,
    demands: Policy,
    *,
    predict: Callable[[Placement], float] | None,
) -> tuple[ModePlacements, Placement]:
    from convoy.plan.placement.modes import choose_placement, find_placements
    from convoy.plan.report import rule_reports

    sharing = question.settings.plan
    try:
        modes = find_placements(spec, offers, spans, demands.placement, ranks=sharing.ranks)
        return modes, choose_placement(sharing.parallel, modes, predict=predict)
    except (PlanError, SpanError):
        question.on_refused(rule_reports(spec, offers, demands.placement))
        raise


def _report(
    settings: Config,
    placement: Placement,
    left_out: list[ExcludedReport],
    standbys: list[str],
    compared: Compared | None,
) -> PlanReport:
    from convoy.plan.report import report, report_blocks

    blocks = report_blocks(placement, _demand(settings, placement))
    rates = None if compared is None else compared.rates[placement.mode]
    return report(placement, left_out, standbys=standbys, blocks=blocks, rates=rates, compared=compared)


def _read_spec(named: str) -> ModelSpec:
    """Return the structure of a model on this machine. Raises ModelError, for a name on the hub too."""
    from convoy.model.checkpoints.hub.files import HubName
    from convoy.model.checkpoints.source import ModelSource, needs_no_files

    name = HubName.parse(named)
    if name and not needs_no_files(named):
        place = named.partition(":")[0].replace("@", " --revision ")
        only = f" --include '*{name.file}*'" if name.file else ""
        raise ModelError(
            f"no model at {named}: a plan reads no hub",
            hint=f"`hf download {place}{only} --local-dir DIR`, then name DIR",
        )
    return ModelSource.resolve(named).spec


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
    note: Note

    @functools.cached_property
    def speeds(self) -> dict[str, Speed]:
        cache = self.settings.model.cache or default_cache()
        return speeds_of(self.offers, self.speed_flags, self.here, cache, self.note)

    @functools.cached_property
    def links(self) -> Links:
        return links_of(self.offers, self.trip_flags, self.here)

    def step_s(self, placement: Placement) -> float:
        """Return the seconds of a decode step of one sequence."""
        from convoy.plan.rates.rates import predict

        return predict(placement, self.speeds, self.links, self._workload(placement.spec)).decode.step_s

    def compare(self, modes: ModePlacements) -> Compared:
        from convoy.plan.rates.compare import compare

        return compare(modes, self.speeds, self.links, self._workload(modes.spec))

    def _workload(self, spec: ModelSpec) -> Workload:
        from convoy.plan.rates.rates import Workload

        options = head_options(self.settings).for_kernels(offer.kernel for offer in self.offers)
        return Workload(min(self.context, spec.max_context), options.max_batch, options.chunk_tokens)


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
    return (EXACT if platform.machine() in {"x86_64", "AMD64"} else PLAIN), _HOST


def _unpacks(spec: ModelSpec, kernel: str) -> bool:
    """Return whether members would unpack the matrices of the file to float32.

    All are taken to be as this machine: they unpack if nothing can be compiled here.
    """
    kept, unpacked = (
        spec.weight_bytes(0, spec.num_layers, embed=True, output=True, dtype=form)
        for form in (kernel, held_form(kernel, unpacks=True))
    )
    if kept == unpacked:
        return False
    # It takes no torch, but a compiler where no member ran here before.
    from convoy.model.kernels.native.build import best_built

    return best_built() is None


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


def _with_levels(offers: list[MemberOffer], levels: Sequence[str]) -> list[MemberOffer]:
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


def _capped(offers: list[MemberOffer], demands: Policy, note: Note) -> list[MemberOffer]:
    """Return the offers with at most the memory that the policy allows."""
    from convoy.plan.memory.memory import format_bytes

    found = []
    for offer in offers:
        counted = demands.capped(offer.name, offer.memory_bytes, head=offer.head)
        if counted < offer.memory_bytes:
            offered = format_bytes(offer.memory_bytes)
            note(f"{offer.name} offers {offered}, and the policy lets {format_bytes(counted)} count")
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


def _offers(settings: Config, members: Members | None, note: Note) -> list[MemberOffer]:
    """Return the ``members``, otherwise of the roster, otherwise two.

    The memory of other members is unknown before they answer.
    """
    from convoy.plan.offer import MemberOffer

    if members is None and settings.cluster.roster is not None:
        names = _roster_names(settings)
        if len(names) > 1:
            note("memory of the other members is unknown: each is assumed to have as much as this one")
        return [MemberOffer(name, _memory_bytes(settings), index == 0) for index, name in enumerate(names)]
    listed = members or tuple((name, None) for name in local_names(2))
    share = _memory_bytes(settings) // len(listed)
    return [MemberOffer(name, size or share, index == 0) for index, (name, size) in enumerate(listed)]


def _roster_names(settings: Config) -> list[str]:
    """Return the names in the roster, head first.

    The head is this member if the roster allows it, otherwise the first member that may be head.
    """
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
