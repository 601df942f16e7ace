"""List and remove the models that this machine caches, and keep folders that a process uses.

    CACHE/models/<digest of a manifest>                              layers that a member received
    CACHE/hub/models--org--name/snapshots/<commit>                   a whole model of a hub
    CACHE/digests                                                    digests of files, by path

A process that may read a folder again holds it (`InUse`), and no process removes it meanwhile.
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
    """Describe one cached folder. ``name`` is the digest of a manifest, ``org/name@commit``, or "digests"."""

    name: str
    folder: Path
    # a description for the user
    what: str
    num_bytes: int
    in_use: bool


class InUse:
    """Hold ``folder`` for this process, so that no process removes it until `close` or the process's end."""

    def __init__(self, folder: Path) -> None:
        """Lock the folder, shared. A folder that this user cannot write is no cache of theirs: it is not
        locked.
        """
        self.folder = folder
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):
            self._descriptor = os.open(folder / _USE, os.O_RDWR | os.O_CREAT, 0o600)
            # wait for the lock: a process that lists the cache holds each of these locks for a moment
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def list_cache(cache: Path) -> list[Cached]:
    """Return all cached folders, the largest first. Raises ModelError for a folder that cannot be read."""
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
    """Remove a cached folder. Raises ModelError if it is in use or cannot be removed."""
    with unused(cached.folder) as is_free:
        if not is_free:
            raise ModelError(
                f"{cached.name} is in use and is not removed",
                hint="end the member that runs it, and try again",
            )
        with explained(cached.folder, "removed"):
            shutil.rmtree(cached.folder)


def _cached(name: str, folder: Path, what: str) -> Cached:
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    # count blocks as the disk does, including those of partial files
    size = sum(path.stat().st_blocks * 512 for path in files)
    with unused(folder) as is_free:
        return Cached(name, folder, what, size, not is_free)


def _kind_of(folder: Path) -> str:
    try:
        config = json.loads(file_bytes(folder / "config.json", _MAX_CONFIG_BYTES))
        return f"a {str(config['model_type'])[:40]} model"
    except (ModelError, ValueError, KeyError, TypeError, RecursionError):
        return "a model"


@contextlib.contextmanager
def unused(folder: Path) -> Iterator[bool]:
    """Yield whether no process holds or writes ``folder``; none can begin to while the block runs."""
    with contextlib.ExitStack() as stack:
        for name in _LOCKS:
            try:
                descriptor = os.open(folder / name, os.O_RDWR)
            # the lock file does not exist: no process ever used the folder
            except OSError:
                continue
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
        yield True
