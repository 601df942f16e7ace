"""Private files: written once, readable only by their owner, refused when others could read them."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from convoy.config.files import FOLDER_HINT
from convoy.errors import IdentityError

MAX_KEYFILE_BYTES = 16 * 1024


def make_private_directory(path: Path) -> None:
    """Create ``path`` with mode 0700. Raises `IdentityError` if it exists and others may enter it."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise IdentityError(f"cannot make directory {path}: {error.strerror}", hint=FOLDER_HINT) from error
    check_private_directory(path)


def check_private_directory(path: Path) -> None:
    """Raise `IdentityError` if ``path`` is missing, belongs to another user, or others may enter it."""
    try:
        status = path.stat()
    except OSError as error:
        raise IdentityError(
            f"cannot read {path}: {error.strerror}",
            hint="is this the directory of the keys? `convoy identity new NAME` makes new ones",
        ) from error
    _check_mode(path, status, "directory")


def write_private(path: Path, data: bytes) -> None:
    """Write a new file with mode 0600. Raises `IdentityError`.

    An existing file is never overwritten, because a lost key is lost for good.
    """
    # O_EXCL also refuses a symbolic link that another user placed there.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileExistsError:
        raise IdentityError(
            f"{path} exists already", hint="choose another directory, or move the old key away yourself"
        ) from None
    except OSError as error:
        raise IdentityError(f"cannot write {path}: {error.strerror}", hint=FOLDER_HINT) from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_private(path: Path, data: bytes) -> None:
    """Replace an existing file by ``data``, completely or not at all, with mode 0600.

    Raises `IdentityError`; then the old file is unchanged.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        write_private(beside, data)
        # The rename is atomic. It survives a power cut once the directory is on disk.
        beside.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        raise IdentityError(f"cannot write {path}: {error.strerror}", hint=FOLDER_HINT) from error
    finally:
        beside.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on disk. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_private(path: Path) -> bytes:
    """Read a private file. Raises `IdentityError` if it is missing, too long or readable by others."""
    try:
        with path.open("rb") as file:
            # The mode is that of the open file, so the path cannot be exchanged between check and read.
            _check_mode(path, os.fstat(file.fileno()), "file")
            data = file.read(MAX_KEYFILE_BYTES + 1)
    except OSError as error:
        raise IdentityError(
            f"cannot read {path}: {error.strerror}",
            hint="is this the directory of the keys? `convoy identity new NAME` makes new ones",
        ) from error
    if len(data) > MAX_KEYFILE_BYTES:
        raise IdentityError(f"{path} is longer than {MAX_KEYFILE_BYTES} bytes, so it is no key of ours")
    return data


def check_private_file(path: Path, status: os.stat_result) -> None:
    """Raise `IdentityError` if a file belongs to another user, or others may read it."""
    _check_mode(path, status, "file")


def _check_mode(path: Path, status: os.stat_result, kind: str) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        wanted = 0o700 if kind == "directory" else 0o600
        raise IdentityError(
            f"{kind} {path} has mode {mode:04o}, expected {wanted:04o}: others could read the key",
            hint=f"chmod {wanted:o} {path}, and make a new identity if the machine has other users",
        )
    if status.st_uid != os.getuid():
        raise IdentityError(
            f"{kind} {path} belongs to user {status.st_uid}, expected {os.getuid()}",
            hint="run convoy as the user that owns the keys",
        )
