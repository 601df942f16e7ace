"""A private folder that lives as long as its process, or a little longer if the process is killed.

No process can remove a folder after `kill -9`. So each folder holds a file that its owner keeps locked, and
the kernel frees the lock when the owner ends. The next start of this user removes folders without an owner.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "convoy-"
LOCK_NAME = ".in-use"


@contextlib.contextmanager
def temporary_folder(parent: Path | None = None) -> Iterator[Path]:
    """Yield a new folder that only this user can read, and remove it at the end.

    Remove folders of processes that were killed before. ``parent`` is the system's temporary folder.
    """
    parent = parent or Path(tempfile.gettempdir())
    remove_dead_folders(parent, os.geteuid())
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    lock = _make_lock(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_dead_folders(parent: Path, user_id: int) -> None:
    """Remove the temporary folders in ``parent`` that belong to ``user_id`` and that no process uses."""
    try:
        names = [name for name in os.listdir(parent) if name.startswith(_PREFIX)]
    except OSError:
        # Some systems let users make entries in a folder that they cannot list.
        return
    for name in names:
        # A folder that cannot be opened or removed is another user's, or is in use.
        with contextlib.suppress(OSError):
            _remove_if_dead(parent / name, user_id)


def _make_lock(folder: Path) -> int:
    """Return the descriptor of the folder's lock, which must stay open. Child processes do not inherit it."""
    unlocked = folder / f"{LOCK_NAME}.new"
    lock = os.open(unlocked, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    # A file system without locks keeps the folder for ever, as nothing there proves that its owner is dead.
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX)
        # The name comes last, so that a lock of this name without an owner means that the owner is dead.
        unlocked.rename(folder / LOCK_NAME)
    return lock


def _remove_if_dead(folder: Path, user_id: int) -> None:
    """Remove ``folder`` if ``user_id`` owns it and no process holds its lock. Raises OSError otherwise.

    Anybody may put a link into the parent, so no link is followed.
    """
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(directory).st_uid != user_id:
            return
        lock = os.open(LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW, dir_fd=directory)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        finally:
            os.close(lock)
    finally:
        os.close(directory)
