"""``convoy rm``: remove models that this machine keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.model_files.models import CacheFlag, ConfigFlag, cache_folder
from convoy.cli.show.output import JsonFlag, format_bytes, print_json, print_note
from convoy.errors import UsageError

if TYPE_CHECKING:
    from convoy.model.checkpoints.hub.cache import Cached


def rm(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME...", help="Names as `convoy models` lists them, or how they begin."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all that is not in use.")] = False,
    cache: CacheFlag = None,
    config: ConfigFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Remove models that this machine keeps.

    None that a running member may load again is removed.
    """
    from convoy.model.checkpoints.hub.cache import list_cache, remove

    if bool(names) == everything:
        raise UsageError("name the models to remove, or give --all", hint="`convoy models` lists them")
    kept = list_cache(cache_folder(cache, config))
    gone = (
        [one for one in kept if not one.in_use]
        if everything
        else list({one.name: one for name in names or () for one in _named(kept, name)}.values())
    )
    for one in gone:
        remove(one)
    size = sum(one.num_bytes for one in gone)
    if as_json:
        print_json({"removed": [one.name for one in gone], "bytes": size})
    else:
        print_note(f"removed: {', '.join(one.name for one in gone) or 'nothing'}; {format_bytes(size)}")


def _named(kept: list[Cached], name: str) -> list[Cached]:
    """Return the entries that ``name`` means: all commits of ``org/name``, or the one that begins so."""
    whole = [one for one in kept if name in {one.name, one.name.partition("@")[0]}]
    fits = whole or [one for one in kept if name and one.name.startswith(name)]
    if not fits or (not whole and len(fits) > 1):
        raise UsageError(
            f"{name or 'an empty name'} matches {len(fits)} of the models kept here, expected one",
            hint="`convoy models` lists the names",
        )
    return fits
