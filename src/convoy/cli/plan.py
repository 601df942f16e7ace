"""``convoy plan``: how a model would be split, from its configuration alone: nothing is loaded or run."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.config import Config, load_config
from convoy.cli.home import config_file
from convoy.cli.member import load_policy
from convoy.cli.members import LayersFlag, parse_members, spans_by_name
from convoy.cli.output import (
    JsonFlag,
    format_bytes,
    print_fields,
    print_json,
    print_note,
    print_table,
)
from convoy.errors import ConfigError, PlanError, SpanError, UsageError

if TYPE_CHECKING:
    from convoy.plan.offer import MemberOffer
    from convoy.plan.report import ExcludedReport, PlanReport, RuleReport
    from convoy.plan.spec import ModelSpec
    from convoy.trust.level import Level
    from convoy.trust.policy import Policy

ConfigFlag = Annotated[
    Path | None,
    typer.Option(
        help="A convoy.toml: model, roster, spans.  [default: .convoy/convoy.toml, but for --members]"
    ),
]


def plan(
    model: Annotated[
        str | None, typer.Argument(help="demo, demo-mini, a directory or synthetic:NAME.")
    ] = None,
    members: Annotated[
        str | None, typer.Option(help="How many on this machine, or NAME=GB,NAME=GB; the first is the head.")
    ] = None,
    layers: LayersFlag = None,
    policy: Annotated[
        Path | None, typer.Option(help="A policy file with [[placement]] rules.  [default: the config's]")
    ] = None,
    level: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=LEVEL: suppose that this was proved of a member: none, self_signed, hardware."
        ),
    ] = None,
    config: ConfigFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Show who would hold which layers and see token ids, and why.

    Which rule of a policy excludes whom is in it. Runs nothing.
    """
    from convoy.plan.placement import place
    from convoy.plan.report import report

    # Members that were named on the command line are not those of the cluster that this folder may belong to.
    settings = load_config(config_file(config) if members is None else config)
    named = model or settings.model_name()
    if named is None:
        raise UsageError("no model is named", hint="give MODEL, or --config with a [model]")
    demands = load_policy(policy or settings.cluster.policy)
    offers = _with_levels(_offers(settings, members), level or [])
    spans = spans_by_name(layers, [offer.name for offer in offers]) or settings.plan.layers
    offers, left_out = _above(demands.minimum, offers)
    # Last, because it takes the seconds that torch takes to load.
    from convoy.model.source import ModelSource

    spec = _as_held(ModelSource.resolve(named).spec, settings)
    with _rules_shown(spec, offers, demands, quiet=as_json):
        found = report(place(spec, offers, spans, demands.placement), left_out)
    print_json(found) if as_json else _print(found)


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


def _as_held(spec: ModelSpec, settings: Config) -> ModelSpec:
    """In the form that the members' kernel would load. Nothing is proved here: `auto` is taken for exact mode
    where that can be, on x86-64.
    """
    kernel = settings.model.kernel
    exact = kernel == "exact-f32" or (kernel == "auto" and platform.machine() in {"x86_64", "AMD64"})
    return spec.packed() if exact else spec


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
    import psutil

    granted = int(settings.model.memory_gb * 10**9)
    available: int = psutil.virtual_memory().available
    if granted > psutil.virtual_memory().total:
        raise ConfigError(f"[model] memory_gb is {settings.model.memory_gb:g}, more than this machine has")
    return granted or available


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
    print_rules(found.rules)
    for out in found.left_out:
        print(f"no stage: {out.reason}")
    print(f"token ids are seen by: {', '.join(found.token_id_members)}")


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
