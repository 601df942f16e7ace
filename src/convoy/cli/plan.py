"""``convoy plan``: how a model would be split, from its configuration alone: nothing is loaded or run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.config import Config, load_config
from convoy.cli.members import LayersFlag, parse_members, spans_by_name
from convoy.cli.output import (
    JsonFlag,
    format_bytes,
    print_fields,
    print_json,
    print_note,
    print_table,
)
from convoy.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from convoy.plan.placement import MemberOffer
    from convoy.plan.report import PlanReport


def plan(
    model: Annotated[str | None, typer.Argument(help="demo, demo-mini or a directory.")] = None,
    members: Annotated[
        str | None, typer.Option(help="How many on this machine, or NAME=GB,NAME=GB; the first is the head.")
    ] = None,
    layers: LayersFlag = None,
    config: Annotated[Path | None, typer.Option(help="A convoy.toml: model, roster and spans.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show who would hold which layers, and who sees token ids. Runs nothing."""
    from convoy.plan.placement import place
    from convoy.plan.report import report

    settings = load_config(config)
    named = model or settings.model_name()
    if named is None:
        raise UsageError("no model is named", hint="give MODEL, or --config with a [model]")
    offers = _offers(settings, members)
    spans = spans_by_name(layers, [offer.name for offer in offers]) or settings.plan.layers
    # Last, because it takes the seconds that torch takes to load.
    from convoy.model.source import ModelSource

    source = ModelSource.resolve(named)
    found = report(place(source.spec, offers, spans))
    if as_json:
        print_json(found)
    else:
        _print(found)


def _offers(settings: Config, members: str | None) -> list[MemberOffer]:
    """Those of ``--members``, else of the roster, else two. Others' memory is unknown until they answer."""
    from convoy.plan.placement import MemberOffer

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
    print(f"token ids are seen by: {', '.join(found.token_id_members)}")
