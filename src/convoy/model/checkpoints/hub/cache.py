"""What this machine keeps of models beside their directories: how much it is, and who uses it.

    CACHE/models/<digest of a manifest>                              layers that a member got
    CACHE/hub/models--org--name/snapshots/<commit>                   a model of a hub, whole
    CACHE/digests                                                    digests of files, by path

A process that may read a folder again holds it (`InUse`), and nobody removes it meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from convoy.errors import ModelError
from convoy.model.checkpoints.checkpoint import file_bytes
from convoy.model.checkpoints.hub.files import FOLDER as HUB
from convoy.model.checkpoints.hub.files import commit_of
from convoy.model.checkpoints.store.parts import explained
from convoy.model.checkpoints.store.received import FOLDER as RECEIVED

DIGESTS = "digests"
_USE = ".use"
_LOCKS = (_USE, ".lock")
_MAX_CONFIG_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Cached:
    """One folder. ``name``: the digest of a manifest, ``org/name@commit``, or "digests"."""

    name: str
    folder: Path
    what: str  # for people
    num_bytes: int
    in_use: bool


class InUse:
    """This process reads ``folder``, and may again: until `close`, or its end, nobody removes it."""

    def __init__(self, folder: Path) -> None:
        """A folder that cannot be written is nobody's cache, and is not held."""
        self.folder = folder
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):
            self._descriptor = os.open(folder / _USE, os.O_RDWR | os.O_CREAT, 0o600)
            # it waits: whoever lists the cache has all of these for a moment
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def list_cache(cache: Path) -> list[Cached]:
    """The largest first. Raises ModelError for a folder that cannot be read."""
    found = []
    with explained(cache, "read"):
        for folder in sorted((cache / RECEIVED).glob("*")):
            found.append(_cached(folder.name, folder, f"layers of {_kind_of(folder)}"))
        for folder in sorted((cache / HUB).glob("models--*/snapshots/*")):
            found.append(_cached(commit_of(folder) or folder.name, folder, "from a hub, whole"))
        if (cache / DIGESTS).is_dir():
            found.append(_cached(DIGESTS, cache / DIGESTS, "digests of files, remembered"))
    return sorted(found, key=lambda one: -one.num_bytes)


def remove(cached: Cached) -> None:
    """Raises ModelError for what is in use, or cannot be removed."""
    with _nobody_in(cached.folder) as is_free:
        if not is_free:
            raise ModelError(
                f"{cached.name} is in use, and stays", hint="end the member that runs it, and try again"
            )
        with explained(cached.folder, "removed"):
            shutil.rmtree(cached.folder)


def _cached(name: str, folder: Path, what: str) -> Cached:
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    size = sum(path.stat().st_blocks * 512 for path in files)  # as the disk counts: half a file too
    with _nobody_in(folder) as is_free:
        return Cached(name, folder, what, size, not is_free)


def _kind_of(folder: Path) -> str:
    try:
        config = json.loads(file_bytes(folder / "config.json", _MAX_CONFIG_BYTES))
        return f"a {str(config['model_type'])[:40]} model"
    except (ModelError, ValueError, KeyError, TypeError, RecursionError):
        return "a model"


@contextlib.contextmanager
def _nobody_in(folder: Path) -> Iterator[bool]:
    """Whether no process holds or writes ``folder``; as long as the block runs, none begins to."""
    with contextlib.ExitStack() as stack:
        for name in _LOCKS:
            try:
                descriptor = os.open(folder / name, os.O_RDWR)
            except OSError:  # nobody ever did
                continue
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
        yield True
