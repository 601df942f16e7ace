"""List the models that this machine keeps, and whether they fit the members: the core of `convoy models`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from convoy.errors import ModelError
from convoy.sdk.planning.fit import FitForm, fit_as_stored

if TYPE_CHECKING:
    from convoy.model.checkpoints.hub.cache import Cached
    from convoy.sdk.planning.members import PlanMembers
    from convoy.sdk.planning.planning import PlanQuestion
    from convoy.sdk.planning.speeds import Measurements


class KeptModel(msgspec.Struct, frozen=True):
    """Describe a folder of the cache, or one of several models in it.

    ``name`` is for ``convoy rm``. ``model`` is for ``convoy serve``; it is empty for layers and digests.
    ``problem`` says why the model cannot be served as it lies there. ``fit`` is None if it was not asked for.
    """

    name: str
    what: str
    num_bytes: int
    in_use: bool
    model: str = ""
    problem: str = ""
    fit: FitForm | None = None


def list_kept(cached: Iterable[Cached]) -> list[KeptModel]:
    """Return the entries of a cache, and the models of each commit of a hub. Reads no header."""
    found: list[KeptModel] = []
    for one in cached:
        models = _models_in(one)
        if not models:
            found.append(KeptModel(one.name, one.what, one.num_bytes, one.in_use))
        for model, path in models.items():
            size = one.num_bytes if len(models) == 1 else _size(path)
            found.append(KeptModel(one.name, one.what, size, one.in_use, model, _lacking(one.folder, path)))
    return found


def with_fits(
    kept: Iterable[KeptModel],
    cached: Iterable[Cached],
    question: PlanQuestion,
    members: PlanMembers,
    measurements: Measurements,
) -> list[KeptModel]:
    """Return the entries with whether their models fit the members, in the form of their files."""
    from convoy.model.checkpoints.source import ModelSource

    places = {model: path for one in cached for model, path in _models_in(one).items()}
    found = []
    for one in kept:
        if not one.model or one.problem:
            found.append(one)
            continue
        try:
            source = ModelSource.resolve(str(places[one.model]))
            fit = fit_as_stored(question, members, measurements, source)
            found.append(msgspec.structs.replace(one, fit=fit))
        except ModelError as error:
            found.append(msgspec.structs.replace(one, problem=error.message))
    return found


def _models_in(cached: Cached) -> dict[str, Path]:
    """Return the models of one commit of a hub, by the names that `convoy serve` takes."""
    from convoy.model.checkpoints.formats.gguf.split import SUFFIX, is_beside, shard_paths
    from convoy.model.checkpoints.hub.files import commit_of

    if not commit_of(cached.folder):
        return {}
    halves = {half.with_suffix("") for half in cached.folder.rglob("*.part")}
    files = sorted({*cached.folder.rglob(f"*{SUFFIX}"), *(one for one in halves if one.suffix == SUFFIX)})
    first = [file for file in files if not is_beside(file) and shard_paths(file)[0] == file]
    if first:
        return {commit_of(file): file for file in first}
    return {cached.name: cached.folder}


def _lacking(folder: Path, path: Path) -> str:
    """Return why a model is not whole; "" if it seems to be."""
    from convoy.model.checkpoints.formats.gguf.split import shard_paths

    if path == folder:
        is_half = any(folder.rglob("*.part"))
    else:
        is_half = not all(shard.is_file() for shard in shard_paths(path))
    return "the download is not complete" if is_half else ""


def _size(path: Path) -> int:
    from convoy.model.checkpoints.formats.gguf.split import shard_paths

    return sum(shard.stat().st_size for shard in shard_paths(path) if shard.is_file())
