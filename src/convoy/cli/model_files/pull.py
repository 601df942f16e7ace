"""``convoy pull``: download models of a hub into this machine's cache, before they are served."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from convoy.cli.model_files.models import CacheFlag, ConfigFlag
from convoy.cli.running.hub import local_model
from convoy.cli.show.output import JsonFlag, format_bytes, print_json, print_note
from convoy.config.settings import load_config, override
from convoy.errors import UsageError


def pull(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="org/name[@revision][:QUANT] of the hub.")
    ],
    cache: CacheFlag = None,
    config: ConfigFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Download models of a hub, before they are served.

    A download that was ended goes on where it was. Members without the files get their own layers when a head
    serves the model.
    """
    from convoy.model.checkpoints.hub.files import HubName

    for name in names:
        if HubName.parse(name) is None:
            raise UsageError(
                f"{name[:200]} is no model of a hub, expected org/name[@revision][:QUANT]",
                hint="`convoy models` lists good choices",
            )
    settings = load_config(config)
    settings = override(settings, model=override(settings.model, cache=cache))
    places = {name: Path(local_model(settings, name, quiet=as_json)) for name in names}
    if as_json:
        print_json({name: str(place) for name, place in places.items()})
        return
    for name, place in places.items():
        print_note(f"{name}: {format_bytes(_size(place))} in {place}")
    print_note(f"serve it: convoy serve {names[0]}")


def _size(place: Path) -> int:
    files = place.rglob("*") if place.is_dir() else [place]
    return sum(file.stat().st_size for file in files if file.is_file())
