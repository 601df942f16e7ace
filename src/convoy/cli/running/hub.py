"""The flags of a model's weights, and models opened with progress on standard error."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from convoy.cli.flags.table import option
from convoy.cli.show.output import print_note
from convoy.cli.show.progress import loading_bars
from convoy.config.table import row
from convoy.errors import ConfigError
from convoy.sdk import models
from convoy.sdk.options import Note, unheard

if TYPE_CHECKING:
    from convoy.config.settings import Config
    from convoy.sdk.models import OpenedModel

WeightsFromFlag = Annotated[str | None, option("model", "weights_from")]
_ACTION = "downloading"
SignedFlag = Annotated[Path | None, option("model", "signed")]


def weights_from(text: str | None) -> str | None:
    """Return the flag's value. Raises ConfigError for an unknown one."""
    *first, last = row("model", "weights_from").choices
    if text not in {None, *first, last}:
        raise ConfigError(f"--weights-from is {text}, expected {', '.join(first)} or {last}")
    return text


def local_model(settings: Config, named: str, *, quiet: bool) -> str:
    """Return the result of `models.local_model`, and show its progress."""
    with loading_bars(quiet=quiet, action=_ACTION) as on_load:
        return models.local_model(settings, named, on_load, _note(quiet=quiet))


def open_model(settings: Config, named: str, *, quiet: bool) -> OpenedModel:
    """Return the result of `models.open_model`, and show its progress."""
    with loading_bars(quiet=quiet, action=_ACTION) as on_load:
        return models.open_model(settings, named, on_load, _note(quiet=quiet))


def open_also(settings: Config, first: str | OpenedModel, *, quiet: bool) -> OpenedModel:
    """Return the result of `models.with_also`, and show its progress. ``first`` may be a local name."""
    from convoy.model.checkpoints.source import ModelSource

    opened = models.OpenedModel(ModelSource.resolve(first)) if isinstance(first, str) else first
    with loading_bars(quiet=quiet, action=_ACTION) as on_load:
        return models.with_also(settings, opened, on_load, _note(quiet=quiet))


def _note(*, quiet: bool) -> Note:
    return unheard if quiet else print_note
