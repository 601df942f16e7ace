"""``convoy cache``: list the model files that this machine keeps, and remove them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.show.output import JsonFlag, format_bytes, print_json, print_note, print_table
from convoy.config.files import default_cache
from convoy.config.settings import load_config
from convoy.errors import UsageError

if TYPE_CHECKING:
    from convoy.model.checkpoints.hub.cache import Cached

CacheFlag = Annotated[Path | None, typer.Option(help="The cache folder.  [default: the one in --config]")]
ConfigFlag = Annotated[Path | None, typer.Option(help="A convoy.toml, for [model] cache.")]


def cache(
    remove: Annotated[
        list[str] | None,
        typer.Option(help="Remove an entry, by its name or the start of it; repeatable."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--remove-all", help="Remove all entries that are not in use.")
    ] = False,
    cache: CacheFlag = None,
    config: ConfigFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Show the cached model files and their sizes; remove them."""
    from convoy.model.checkpoints.hub.cache import list_cache

    folder = cache or load_config(config).model.cache or default_cache()
    kept = list_cache(folder)
    if remove or everything:
        gone = (
            [one for one in kept if not one.in_use]
            if everything
            else [_named(kept, name) for name in remove or ()]
        )
        _remove(gone)
        kept = [one for one in kept if one not in gone]
        if not as_json:
            print_note(f"removed: {format_bytes(sum(one.num_bytes for one in gone))}")
    _print(folder, kept, as_json=as_json)


def _remove(gone: list[Cached]) -> None:
    from convoy.model.checkpoints.hub.cache import remove

    for one in gone:
        remove(one)


def _named(kept: list[Cached], name: str) -> Cached:
    """Return the entry that ``name`` means. Raises UsageError if none matches, or more than one."""
    fits = [one for one in kept if one.name == name] or [one for one in kept if one.name.startswith(name)]
    if not name or len(fits) != 1:
        count = len(fits) if name else 0
        raise UsageError(
            f"--remove {name} matches {count} entries, expected one", hint="`convoy cache` lists the names"
        )
    return fits[0]


def _print(folder: Path, kept: list[Cached], *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "folder": str(folder),
                "kept": [
                    {"name": one.name, "what": one.what, "bytes": one.num_bytes, "in_use": one.in_use}
                    for one in kept
                ],
            }
        )
        return
    rows = [
        (_short(one.name), format_bytes(one.num_bytes), one.what, "in use" if one.in_use else "")
        for one in kept
    ]
    print_table(("name", "size", "what", ""), rows)
    print_note(f"{format_bytes(sum(one.num_bytes for one in kept))} in {folder}")


def _short(name: str) -> str:
    repo, at, commit = name.rpartition("@")
    return f"{repo}{at}{commit[:12]}"
