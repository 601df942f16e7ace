"""Plan a model over members from its configuration alone: the core of ``convoy plan`` and `convoy.plan`."""

from __future__ import annotations

import dataclasses
import functools
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from convoy.config.files import default_cache
from convoy.config.kernels import AUTO, EXACT, PLAIN, computing_kernel, form_of, held_form, kv_form
from convoy.config.settings import Config, load_config, override
from convoy.errors import PlanError, SpanError, UsageError
from convoy.sdk.models import describe_model
from convoy.sdk.names import local_names
from convoy.sdk.options import Note, head_options, unheard
from convoy.sdk.planning.members import Members, MembersQuestion, PlanMembers, find_members
from convoy.sdk.planning.speeds import Here, Measurements

if TYPE_CHECKING:
    from convoy.model.checkpoints.source import ModelSource
    from convoy.plan.memory.blocks import BlockDemand
    from convoy.plan.offer import MemberOffer
    from convoy.plan.placement.modes import ModePlacements
    from convoy.plan.placement.placement import Placement
    from convoy.plan.rates.compare import Compared
    from convoy.plan.rates.rates import Links, Workload
    from convoy.plan.report import PlanReport, RuleReport
    from convoy.plan.spec.model import ModelSpec
    from convoy.plan.speed import Speed

_HOST = "cpu"


@dataclasses.dataclass(frozen=True)
class PlanQuestion:
    """Hold the inputs of a plan.

    ``members`` None takes the roster of the settings, otherwise two members here. ``devices`` are members of
    machines that need not run yet. They, ``layers``, ``levels``, ``speeds`` and ``round_trips`` are texts as
    the flags of ``convoy plan`` take them. ``measured`` False
    predicts no rates, and measures nothing. ``on_refused`` gets the rules if they allow no plan.
    """

    settings: Config
    model: str | None = None
    members: Members | None = None
    layers: Sequence[str] | None = None
    policy: Path | None = None
    levels: Sequence[str] = ()
    kernel: str = AUTO
    standbys: Sequence[str] = ()
    speeds: Sequence[str] = ()
    round_trips: Sequence[str] = ()
    context: int = 512
    threads: int | None = None
    measured: bool = True
    note: Note = unheard
    on_refused: Callable[[list[RuleReport]], None] = lambda _rules: None
    devices: Sequence[str] = ()
    # The flag, key or argument with the kernel, as errors name it.
    kernel_from: str = "kernel"

    def find_members(self) -> PlanMembers:
        """Return the members. Raises UsageError or ConfigError for texts that make no sense."""
        asked = MembersQuestion(
            self.settings, self.members, self.devices, self.layers, self.policy, self.levels, self.standbys
        )
        return find_members(asked, self.note)

    def measurements(self, members: PlanMembers, *, rough: bool = False) -> Measurements:
        """Return what gives speeds and links. Nothing is measured before it is asked.

        For a ``rough`` question, measurements of earlier days are enough.
        """
        settings = self.settings
        if members.kinds:
            here = Here.elsewhere(settings, self.threads)
        else:
            here = Here.of(
                settings, self.members, members.offers, _device_here(self), self.threads, hosts=members.hosts
            )
        cache = settings.model.cache or default_cache()
        return Measurements(here, self.speeds, self.round_trips, cache, self.note, rough)


def plan(
    model: str | None = None,
    *,
    members: int | Mapping[str, float] | None = None,
    config: str | Path | None = None,
    layers: Sequence[str] | None = None,
    standbys: Sequence[str] = (),
    kernel: str | None = None,
    compute: str | None = None,
    kv_dtype: str | None = None,
    context: int = 512,
    measure: bool = True,
    devices: Mapping[str, str] | None = None,
) -> PlanReport:
    """Return which member would hold which layers, how fast, and why. Nothing is loaded or started.

    ``model`` is a name as `serve` takes it; of a model on a hub, only headers are read. ``members`` is a
    number of members on this machine, or names with the GB of each; the first is the head. ``devices`` are
    machines that need not run yet, by name: ``"cuda:24GB"`` or ``"cpu:16GB"``, of which members offer most.
    Without both, the roster of ``config`` (a convoy.toml) counts, otherwise two members here. ``layers`` are
    spans, as ``convoy plan --layers`` takes them. ``compute`` is exact or
    int8, as of ``convoy plan --compute``. ``kv_dtype`` is that of K/V: auto, f32, bf16, f16, q8 or
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
            kernel=computing_kernel(kernel or settings.model.kernel, compute or settings.model.compute),
            standbys=standbys,
            context=context,
            measured=measure,
            devices=[f"{name}={text}" for name, text in (devices or {}).items()],
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
    members = question.find_members()
    source = describe_model(settings, named, note)
    head_options(settings).check_context(source.spec)
    asked, most = question.context, source.spec.max_context
    # The default is more than a small model has.
    if asked > max(most, PlanQuestion.context):
        note(f"{source.name} has a context of {most} tokens, so rates are for {most} and not {asked}")
    return plan_source(question, members, source, question.measurements(members))


def plan_source(
    question: PlanQuestion, members: PlanMembers, source: ModelSource, measurements: Measurements
) -> PlanReport:
    """Return the plan of a model over these members. Raises PlanError or SpanError if none fits."""
    settings = question.settings
    kernels = _kernels(question, members, source)
    for kernel in kernels.values():
        kv_form(kernel, settings.engine.kv_dtype)
    spec = source.spec.with_kv_dtype(settings.engine.kv_dtype)
    offers = [
        dataclasses.replace(
            offer,
            kernel=kernels[offer.name],
            unpacks=not members.kinds and _unpacks(spec, kernels[offer.name]),
        )
        for offer in members.offers
    ]
    paces = _Paces(settings, offers, source, measurements, question.context)
    predict = paces.step_s if question.measured else None
    modes, placement = _choose(question, spec, offers, members, predict=predict)
    compared = paces.compare(modes) if question.measured else None
    found = _report(settings, placement, members, compared)
    return msgspec.structs.replace(found, weight_form=_weight_form(source, placement))


def _choose(
    question: PlanQuestion,
    spec: ModelSpec,
    offers: list[MemberOffer],
    members: PlanMembers,
    *,
    predict: Callable[[Placement], float] | None,
) -> tuple[ModePlacements, Placement]:
    from convoy.plan.placement.modes import choose_placement, find_placements
    from convoy.plan.report import rule_reports

    sharing, rules = question.settings.plan, members.demands.placement
    try:
        modes = find_placements(spec, offers, members.spans, rules, ranks=sharing.ranks)
        return modes, choose_placement(sharing.parallel, modes, predict=predict)
    except (PlanError, SpanError):
        question.on_refused(rule_reports(spec, offers, rules))
        raise


def _report(
    settings: Config,
    placement: Placement,
    members: PlanMembers,
    compared: Compared | None,
) -> PlanReport:
    from convoy.plan.report import report, report_blocks

    blocks = report_blocks(placement, _demand(settings, placement))
    rates = None if compared is None else compared.rates[placement.mode]
    return report(
        placement,
        members.left_out,
        standbys=members.standbys,
        blocks=blocks,
        rates=rates,
        compared=compared,
    )


def _weight_form(source: ModelSource, placement: Placement) -> str:
    """Return the forms in which the stages hold most weights: those of the file, or what they become."""
    from convoy.model.backends.host.form_speed import main_form

    on_card = any(matrix.card_bytes for layer in source.spec.layers for matrix in layer.each.linears)
    words = dict.fromkeys(placement.forms[name] for name in placement.holders)
    told = []
    for form in map(form_of, words):
        keeps = form.keeps or (form.keeps_on_card and on_card)
        kept = main_form(source).removeprefix("gguf:") or "F32" if keeps else form.dtype
        told.append(f"{form.bits} bits" if form.bits else kept)
    return " and ".join(dict.fromkeys(told))


def _demand(settings: Config, placement: Placement) -> BlockDemand:
    options = head_options(settings).for_kernels(placement.kernels[name] for name in placement.holders)
    max_context = options.max_context or placement.spec.max_context
    return options.demand(block_size=settings.engine.block_size, max_context=max_context)


@dataclasses.dataclass(frozen=True)
class _Paces:
    """Predict rates of plans. Measures this machine when the first rate is needed, after a plan was found."""

    settings: Config
    offers: list[MemberOffer]
    source: ModelSource
    measurements: Measurements
    context: int

    @functools.cached_property
    def speeds(self) -> dict[str, Speed]:
        from convoy.model.backends.host.form_speed import main_form

        return self.measurements.speeds(self.offers, main_form(self.source))

    @functools.cached_property
    def links(self) -> Links:
        return self.measurements.links(self.offers)

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
        return Workload(min(self.context, spec.max_context), options.at_once, options.chunk_tokens)


def _kernels(question: PlanQuestion, members: PlanMembers, source: ModelSource) -> dict[str, str]:
    """Return the kernel that each member would run.

    This proves nothing: `auto` counts as CUDA where there is CUDA, otherwise as exact mode on x86-64. Hosts
    that do not run yet count as x86-64.
    """
    asked, names = question.kernel, [offer.name for offer in members.offers]
    if not members.kinds:
        device = _device_here(question, source)
        kernel = _host_kernel(asked) if device == _HOST else _device_kernel(device, question)
        return dict.fromkeys(names, kernel)
    of_hosts = EXACT if asked == AUTO else asked
    kinds = members.kinds
    return {
        name: of_hosts if kinds[name] == _HOST else _device_kernel(kinds[name], question) for name in names
    }


def _host_kernel(asked: str) -> str:
    if asked != AUTO:
        return asked
    return EXACT if platform.machine() in {"x86_64", "AMD64"} else PLAIN


def _device_kernel(device: str, question: PlanQuestion) -> str:
    from convoy.model.device import kernel_on

    return kernel_on(device, question.kernel, question.kernel_from)


def _device_here(question: PlanQuestion, source: ModelSource | None = None) -> str:
    """Return the device on which a member of this machine would compute ``source``, or some model."""
    wish = question.settings.model.device
    # Skips the second that torch takes to load.
    if wish == _HOST:
        return _HOST
    from convoy.model.backends.registry import why_not_chosen
    from convoy.model.device import choose_devices

    why_not = None if source is None else functools.partial(why_not_chosen, source)
    return choose_devices(wish, question.kernel, why_not_mlx=why_not)[0]


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
