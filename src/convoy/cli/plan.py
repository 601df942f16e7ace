"""``convoy plan``: show how a model would be split, from configuration and headers. It loads no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from convoy.cli.checks.plan_print import print_fits, print_plan, print_rules
from convoy.cli.checks.rates import ContextFlag, RoundTripFlag, SpeedFlag, ThreadsFlag
from convoy.cli.flags.quantize import ComputeFlag, QuantizeFlag, kernel_asked_by, kernel_for
from convoy.cli.flags.steps import KvDtypeFlag, check_choice, with_step_flags
from convoy.cli.flags.table import option
from convoy.cli.local.members import LayersFlag, parse_members
from convoy.cli.operator.home import config_file
from convoy.cli.show.output import JsonFlag, print_json, print_note
from convoy.cli.show.progress import counting_bar
from convoy.config.settings import load_config, override
from convoy.sdk.planning.fit import find_fits
from convoy.sdk.planning.planning import PlanQuestion, make_plan

ModelArgument = Annotated[
    str | None, typer.Argument(help="A model, as for `convoy run`; org/name's headers alone are read.")
]
MembersFlag = Annotated[
    str | None, typer.Option(help="A number of members here, or NAME=GB,NAME=GB; the first is the head.")
]
DevicesFlag = Annotated[
    list[str] | None,
    typer.Option(
        "--device",
        help="NAME=cuda:24GB, NAME=mlx:16GB or NAME=cpu:16GB: a member on a machine that need not run "
        "yet, with its whole memory; the first is the head.",
    ),
]
PolicyFlag = Annotated[Path | None, option("cluster", "policy")]
LevelFlag = Annotated[
    list[str] | None,
    typer.Option(help="NAME=LEVEL: assume that a member proved this level: none, self_signed, hardware."),
]
ConfigFlag = Annotated[
    Path | None,
    typer.Option(
        help="A convoy.toml: model, roster, spans.  [default: .convoy/convoy.toml, but for --members "
        "and --device]"
    ),
]
FitFlag = Annotated[
    bool, typer.Option("--fit", help="List which popular models fit the members, in which form, how fast.")
]
StandbysFlag = Annotated[
    list[str] | None, typer.Option(help="NAME of a member that holds no layers until another member is lost.")
]


@with_step_flags
def plan(
    *,
    model: ModelArgument = None,
    members: MembersFlag = None,
    device: DevicesFlag = None,
    layers: LayersFlag = None,
    sharing: dict[str, Any],
    policy: PolicyFlag = None,
    level: LevelFlag = None,
    config: ConfigFlag = None,
    quantize: QuantizeFlag = None,
    compute: ComputeFlag = None,
    kv_dtype: KvDtypeFlag = None,
    standby: StandbysFlag = None,
    speed: SpeedFlag = None,
    round_trip: RoundTripFlag = None,
    context: ContextFlag = 512,
    threads: ThreadsFlag = None,
    fit: FitFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Show which member would hold which layers, how fast, and why.

    Also show which members can read prompts, how much fits, and which members a rule of a policy excludes.
    Loads no weights; runs at most a measurement of this machine.
    """
    # Members that the command line names are not the members of this folder's cluster.
    settings = load_config(config_file(config) if members is None and not device else config)
    check_choice("engine", "kv_dtype", kv_dtype)
    engine = override(settings.engine, kv_dtype=kv_dtype)
    settings = override(settings, plan=override(settings.plan, **sharing), engine=engine)
    kernel = kernel_for(quantize, settings.model.kernel, compute, settings.model.compute)
    question = PlanQuestion(
        settings,
        model,
        None if members is None else parse_members(members),
        layers,
        *(policy, level or (), kernel, standby or (), speed or (), round_trip or ()),
        context,
        threads,
        note=print_note,
        on_refused=(lambda _rules: None) if as_json or fit else print_rules,
        devices=device or (),
        kernel_from=kernel_asked_by(kernel, quantize, compute, settings.model.compute),
    )
    if fit:
        with counting_bar("measuring and planning models", quiet=as_json) as tell:
            fits = find_fits(question, tell)
        print_json(fits) if as_json else print_fits(fits)
        return
    found = make_plan(question)
    print_json(found) if as_json else print_plan(found)
