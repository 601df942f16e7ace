"""``convoy pull``: download models of a hub, to this machine or to every member of a running head."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.model_files.models import CacheFlag, ConfigFlag
from convoy.cli.open import signed_in
from convoy.cli.running.endpoint import CaFlag
from convoy.cli.running.hub import local_model
from convoy.cli.running.process import running_processes
from convoy.cli.show.output import JsonFlag, format_bytes, print_json, print_note
from convoy.cli.show.progress import loading_bars
from convoy.config.settings import load_config, override
from convoy.errors import ConvoyError, HubUnreachable, PeerUnreachable, UsageError
from convoy.sdk.client import cluster_status
from convoy.sdk.endpoint import DEFAULT_URL, Endpoint
from convoy.sdk.models import PULL_AGAIN, PULL_ERRORS

if TYPE_CHECKING:
    from convoy.cluster.status import PullStatus
    from convoy.config.settings import Config

_LOOK_S = 0.5


class PullFailed(ConvoyError):  # noqa: N818 - named after the event
    """Report in the head's words that not every member has its part."""


def pull(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="org/name[@revision][:QUANT] of the hub.")
    ],
    url: Annotated[
        str | None,
        typer.Option("--url", help="The head's HTTP address.  [default: one of yours that runs here]"),
    ] = None,
    ca: CaFlag = None,
    cache: CacheFlag = None,
    config: ConfigFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Download models of a hub, before they are served.

    With a running head of yours on this machine, every member gets its own layers, and the loaded model runs
    on. Without one, or with --cache or --config, this machine alone gets the files. A download that was
    ended goes on where it was.
    """
    from convoy.model.checkpoints.hub.files import HubName

    for name in names:
        if HubName.parse(name) is None:
            raise UsageError(
                f"{name[:200]!r} is no model of a hub, expected org/name[@revision][:QUANT]",
                hint="`convoy models` lists good choices",
            )
    is_here_alone = cache is not None or config is not None
    if url is not None and is_here_alone:
        raise UsageError(
            "--url came with --cache or --config", hint="the head has its own cache: leave one out"
        )
    if url is None and not is_here_alone:
        url = _own_head()
    if url is not None:
        _pull_everywhere(Endpoint.of(url, None, ca), names, as_json=as_json)
        return
    settings = load_config(config)
    settings = override(settings, model=override(settings.model, cache=cache))
    places = {name: _pull_here(settings, name, quiet=as_json) for name in names}
    if as_json:
        print_json({name: str(place) for name, place in places.items()})
        return
    for name, place in places.items():
        print_note(f"{name}: {format_bytes(_size(place))} in {place}")
    _print_next(names)


def _pull_here(settings: Config, name: str, *, quiet: bool) -> Path:
    try:
        return Path(local_model(settings, name, quiet=quiet))
    except HubUnreachable as error:
        raise HubUnreachable(error.message, hint=PULL_AGAIN) from error
    except KeyboardInterrupt:
        _print_stopped(name)
        raise


def _print_stopped(name: str) -> None:
    print_note(f"the pull of {name} stops; `convoy pull {name}` goes on where it was")


def _print_next(names: list[str]) -> None:
    more = "".join(f" --also {name}" for name in names[1:])
    print_note(f"serve {'them' if more else 'it'}: convoy serve {names[0]}{more}")


def _own_head() -> str | None:
    """Return the address that a running head of this user recorded; None without one.

    Another program may listen at the default address, and must get no token. Raises `UsageError` if
    several heads run and none is at the default address.
    """
    urls = sorted({record.head_url for record in running_processes() if record.head_url is not None})
    if DEFAULT_URL in urls:
        return DEFAULT_URL
    if len(urls) > 1:
        raise UsageError(
            f"{len(urls)} heads of yours run here: {', '.join(urls)}", hint="name one with --url"
        )
    return urls[0] if urls else None


def _pull_everywhere(endpoint: Endpoint, names: list[str], *, as_json: bool) -> None:
    with signed_in(endpoint, "operate") as head:
        ends = {name: _pull_one(head, name, quiet=as_json) for name in names}
    if as_json:
        print_json(ends)
        return
    for name, end in ends.items():
        print_note(f"{name}: on {', '.join(sorted(end.progress))}")
    _print_next(names)


def _pull_one(head: Endpoint, name: str, *, quiet: bool) -> PullStatus:
    """Let the head pull a model, and show its progress. An interrupt stops the pull there, too."""
    head.post("/page/pull", {"name": name})
    try:
        with loading_bars(quiet=quiet, action="pulling") as on_load:
            while (now := _state(head, name)).state in {"pulling", "stopping"}:
                for member, (done, total) in now.progress.items():
                    if on_load is not None:
                        on_load(member, done, total)
                time.sleep(_LOOK_S)
    except KeyboardInterrupt:
        head.delete("/page/pull")
        _print_stopped(name)
        raise
    except PeerUnreachable as error:
        raise PeerUnreachable(
            f"the head ended while {name} was pulled: {error.message}",
            hint=f"once it runs again, `convoy pull {name}` goes on where it was",
        ) from error
    if now.state != "pulled":
        kind = next((one for one in PULL_ERRORS if one.__name__ == now.error_type), PullFailed)
        raise kind(f"{name} was not pulled: {now.error}", hint=now.hint or None)
    return now


def _state(head: Endpoint, name: str) -> PullStatus:
    found = cluster_status(head).pull
    if found is None or found.name != name:
        raise PullFailed(
            f"{name} is not pulled any more: the head began anew",
            hint="pull it once more: it goes on where it was",
        )
    return found


def _size(place: Path) -> int:
    files = place.rglob("*") if place.is_dir() else [place]
    return sum(file.stat().st_size for file in files if file.is_file())
