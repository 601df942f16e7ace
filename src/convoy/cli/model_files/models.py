"""``convoy models``: list the models kept here and good choices, and say which fit the members."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import urlsplit

import typer

from convoy.cli.checks.rates import ContextFlag, SpeedFlag
from convoy.cli.local.members import parse_members
from convoy.cli.operator.home import config_file, local_addresses
from convoy.cli.running.endpoint import ApiKeyFlag, CaFlag, client_key
from convoy.cli.show.output import JsonFlag, format_bytes, print_json, print_note, print_table
from convoy.cli.show.progress import CountProgress, counting_bar
from convoy.config.files import default_cache
from convoy.config.settings import Config, load_config, override
from convoy.errors import ConvoyError, PeerUnreachable
from convoy.sdk.client import cluster_status
from convoy.sdk.endpoint import DEFAULT_URL, Endpoint
from convoy.sdk.options import unheard
from convoy.sdk.planning.fit import STORED, FitForm, FitReport, FitRow, fit_shapes, shapes
from convoy.sdk.planning.kept import KeptModel, list_kept, with_fits
from convoy.sdk.planning.planning import PlanQuestion

if TYPE_CHECKING:
    from convoy.cluster.status import ClusterStatus
    from convoy.model.checkpoints.hub.cache import Cached
    from convoy.sdk.planning.members import PlanMembers

CacheFlag = Annotated[Path | None, typer.Option(help="The cache folder.  [default: the one in --config]")]
ConfigFlag = Annotated[Path | None, typer.Option(help="A convoy.toml, for [model] cache.")]
_UrlFlag = Annotated[
    str | None,
    typer.Option("--url", help=f"A head's HTTP address.  [default: {DEFAULT_URL}, if one answers]"),
]
_LOOK_S = 4.0
T = TypeVar("T")
# Slower than this, an answer of a sentence takes ten seconds.
_PATIENT_TOKENS_PER_S = 3.0
# Bytes of a weight as a hub has it.
_STORED_BYTES = 2


def models(
    kept_only: Annotated[
        bool, typer.Option("--kept", help="List the models kept here alone, and plan none.")
    ] = False,
    members: Annotated[
        str | None, typer.Option(help="Members as for `convoy plan`.  [default: a running head's]")
    ] = None,
    device: Annotated[
        list[str] | None, typer.Option(help="NAME=cuda:24GB: a machine that need not run yet; repeatable.")
    ] = None,
    speed: SpeedFlag = None,
    context: ContextFlag = 512,
    url: _UrlFlag = None,
    api_key_file: ApiKeyFlag = None,
    ca: CaFlag = None,
    cache: CacheFlag = None,
    config: Annotated[
        Path | None, typer.Option(help="A convoy.toml: roster and cache.  [default: .convoy/convoy.toml]")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """List the models kept here and good choices; say which fit.

    The members are those of a running head, otherwise of the roster, otherwise this machine alone.
    """
    from convoy.model.checkpoints.hub.cache import list_cache

    folder = cache_folder(cache, config)
    cached = list_cache(folder)
    kept = list_kept(cached)
    if kept_only:
        _print_all(folder, kept, None, None, as_json=as_json)
        return
    settings = load_config(config_file(config) if members is None and not device else config)
    given = None if members is None else parse_members(members)
    status = None
    if given is None and not device:
        status = _running(url, client_key(api_key_file), ca, quiet=as_json)
        if status is None and settings.cluster.roster is None:
            given = (("this machine", None),)
    question = PlanQuestion(
        *(_hosted(settings) if status else settings, None, given),
        speeds=speed or (),
        context=context,
        note=unheard if as_json else print_note,
        devices=device or (),
    )
    offered = _members(question, status, url or DEFAULT_URL)
    kept, found = _planned(question, offered, kept, cached, quiet=as_json)
    _print_all(folder, kept, found, status, as_json=as_json)


def _planned(
    question: PlanQuestion, members: PlanMembers, kept: list[KeptModel], cached: list[Cached], *, quiet: bool
) -> tuple[list[KeptModel], FitReport]:
    """Return the kept models and the choices, each with whether it fits ``members``."""
    # A list of choices needs no figures of today.
    measured = question.measurements(members, rough=True)
    choices = [shape for shape in shapes() if shape.is_choice]
    # A form that was not measured here yet takes seconds.
    with counting_bar("measuring and planning models", quiet=quiet) as tell:
        total = len(kept) + len(choices)
        watched = _watched(kept, tell, 0, total, lambda one: one.name)
        fitting = with_fits(watched, cached, question, members, measured)
        listed = _watched(choices, tell, len(kept), total, lambda one: one.repo)
        return fitting, fit_shapes(question, members, measured, listed, best_only=True)


def _watched(
    models: Sequence[T], tell: CountProgress, done: int, total: int, name_of: Callable[[T], str]
) -> Iterator[T]:
    """Yield ``models``, each after ``tell`` was told of it. ``done`` of ``total`` came before them."""
    for number, model in enumerate(models, done):
        tell(number, total, name_of(model))
        yield model


def cache_folder(cache: Path | None, config: Path | None) -> Path:
    """Return the folder of this machine's models."""
    return cache or load_config(config_file(config)).model.cache or default_cache()


def _hosted(settings: Config) -> Config:
    # Kernels follow the devices of the running members, and not this machine's.
    return override(settings, model=override(settings.model, device="cpu"))


def _members(question: PlanQuestion, status: ClusterStatus | None, url: str) -> PlanMembers:
    if status is None:
        return question.find_members()
    from convoy.sdk.planning.members import members_of

    here = {"localhost", "127.0.0.1", "::1", *local_addresses()}
    is_here = urlsplit(url if "://" in url else f"http://{url}").hostname in here
    own = here if is_here else ()
    return members_of(status, question.settings.cluster.policy, own=own, note=question.note)


def _running(url: str | None, key: str | None, ca: Path | None, *, quiet: bool) -> ClusterStatus | None:
    """Return the status of the head at ``url``, or of one at the default address if it answers."""
    endpoint = Endpoint.of(url or DEFAULT_URL, key, ca, _LOOK_S)
    if url is not None:
        return cluster_status(endpoint)
    try:
        return cluster_status(endpoint)
    except PeerUnreachable:
        return None
    except ConvoyError as error:
        if not quiet:
            print_note(f"the head at {endpoint.url} is left out: {error.message}")
        return None


def _print_all(
    folder: Path,
    kept: list[KeptModel],
    found: FitReport | None,
    status: ClusterStatus | None,
    *,
    as_json: bool,
) -> None:
    if as_json:
        served = None if status is None else status.model
        told: dict[str, Any] = {"folder": folder, "kept": kept, "served": served, "choices": found}
        print_json(told)
        return
    if found is not None:
        sizes = (f"{name} {format_bytes(size)}" for name, size in found.memory_bytes.items())
        print(f"members: {', '.join(sizes)}")
    if status is not None:
        holders = ", ".join(dict.fromkeys(stage.member for stage in status.stages))
        print(f"served now: {status.model}, on {holders}")
    if found is not None:
        print()
    print(f"kept in {folder}: {format_bytes(sum(one.num_bytes for one in kept)) if kept else 'nothing yet'}")
    if kept:
        print_table(["model", "size", "" if found is None else "on your members"], map(_kept_row, kept))
    if found is not None:
        _print_choices(found)


def _kept_row(one: KeptModel) -> tuple[str, str, str]:
    name, at, commit = (one.model or one.name).partition("@")
    shown = f"{name}{at}{commit[:12]}{commit[40:]}"
    told = one.what if not one.model else one.problem if one.fit is None else _fit_text(one.fit)
    if one.problem and one.model:
        told = f"{one.problem}: `convoy pull {name}{commit[40:]}` goes on"
    return shown, format_bytes(one.num_bytes), f"{told}{', in use' if one.in_use else ''}"


def _print_choices(found: FitReport) -> None:
    print()
    print("good choices, by size:")
    rows = sorted(found.rows, key=lambda row: row.num_elements)
    print_table(
        ["model", "parameters", "download", "on your members"],
        [
            (
                row.source,
                f"{row.num_elements / 1e9:.1f} billion",
                format_bytes(row.num_elements * _STORED_BYTES),
                _fit_text(_best_form(row)),
            )
            for row in rows
        ],
    )
    print()
    print(f"rates: of one sequence of {found.context} tokens; `convoy plan --fit` shows every form")
    if found.assumed:
        print(f"assumed: {'; '.join(found.assumed)}")
    fitting = [row for row in rows if row.best]
    if fitting:
        # The largest that a person can wait for; none: the fastest.
        quick = [row for row in fitting if _best_form(row).decode_tokens_per_s >= _PATIENT_TOKENS_PER_S]
        tried = quick[-1] if quick else max(fitting, key=lambda row: _best_form(row).decode_tokens_per_s)
        flag = "" if tried.best == STORED else f" --quantize {tried.best}"
        print(f"try: convoy serve {tried.source}{flag}")


def _best_form(row: FitRow) -> FitForm:
    """Return the first form that fits, otherwise the smallest."""
    return next((form for form in row.forms if form.fits), row.forms[-1])


def _fit_text(form: FitForm) -> str:
    if not form.fits:
        return f"no: {form.form} takes {format_bytes(form.weight_bytes)}"
    rate = form.decode_tokens_per_s
    shown = f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"
    return f"yes, at about {shown} tokens/s, in {form.form}"
