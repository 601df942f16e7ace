"""A model that the command line names as the Hugging Face hub does: fetched, and a directory from then on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoy.cli.member import default_cache
from convoy.cli.output import print_note
from convoy.cli.progress import loading_bars

if TYPE_CHECKING:
    from convoy.cli.config import Config


def local_model(settings: Config, named: str, *, quiet: bool) -> str:
    """``named`` itself, or the directory with the files of ``org/name[@revision]``.

    Raises ModelError where they cannot be had.
    """
    from convoy.model.hub import Hub, HubName
    from convoy.model.source import needs_no_files

    name = None if needs_no_files(named) else HubName.parse(named)
    if name is None:
        return named
    hub = Hub((settings.model.cache or default_cache()) / "hub", settings.model.hub)
    with loading_bars(quiet=quiet) as on_load:
        commit, directory = hub.download(name, on_load)
    if not quiet:
        print_note(f"note: {hub.offline}" if hub.offline else f"model: {name.repo} at commit {commit}")
    return str(directory)
