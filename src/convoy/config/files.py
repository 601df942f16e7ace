"""Files that a flag or a setting names: read with a size limit, written as a whole or not at all."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from convoy.errors import ConfigError

_REMEDY = "is it the right file? check the path"

# The longest PEM file: hundreds of certificates.
MAX_PEM_BYTES = 1 << 20
FOLDER_HINT = "check the folder: its owner, its mode and its free space"
WHENCE_ROSTER = "`convoy roster new` writes a roster, and an invitation leaves one in .convoy"

_KERNELS = "TRITON_CACHE_DIR"


def read_bytes(path: Path, *, max_bytes: int, hint: str | None = None) -> bytes:
    """Return the whole file. Raises ConfigError if it cannot be read or is longer than ``max_bytes``.

    ``hint`` says where such a file comes from, in case it is missing.
    """
    try:
        with path.open("rb") as file:
            # One byte more than the limit shows a longer file without reading all of it.
            data = file.read(max_bytes + 1)
    except OSError as error:
        reason = (error.strerror or "unreadable").lower()
        raise ConfigError(f"cannot read {path}: {reason}", hint=how_to_read(error, path, hint)) from None
    if len(data) > max_bytes:
        raise ConfigError(f"{path} is longer than {max_bytes} bytes", hint=_REMEDY)
    return data


def how_to_read(error: OSError, path: Path, source: str | None) -> str:
    """Return a hint against ``error``. ``source`` says where such a file comes from."""
    if isinstance(error, IsADirectoryError):
        return f"{path} is a folder: name the file in it"
    if isinstance(error, PermissionError):
        return f"chmod u+r {path}, or run this as its owner"
    return source or "check the path: it is relative to this folder, or to the convoy.toml that names it"


def read_text(path: Path, *, max_bytes: int, hint: str | None = None) -> str:
    """Return the whole file as text. Raises ConfigError like `read_bytes`, and if it is not UTF-8."""
    try:
        return read_bytes(path, max_bytes=max_bytes, hint=hint).decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text", hint=_REMEDY) from None


def replace_file(path: Path, data: bytes) -> None:
    """Write a temporary file and rename it, so that a reader never sees half of it. Raises ConfigError."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            file.write(data)
            file.flush()
            # The data must be on disk before the new name is.
            os.fsync(file.fileno())
            # These files are public. `crypto` writes keys, with a private mode.
            Path(file.name).chmod(0o644)
        Path(file.name).replace(path)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {(error.strerror or 'unwritable').lower()}",
            hint=FOLDER_HINT,
        ) from None


def default_cache() -> Path:
    """Return the user's cache folder for Convoy (XDG Base Directory Specification)."""
    return _base_folder("XDG_CACHE_HOME", "~/.cache") / "convoy"


def named_kernel_folder() -> str:
    """Return the folder that the operator named for kernels that Triton compiles, or ""."""
    return os.environ.get(_KERNELS, "")


def keep_kernels_in(folder: Path) -> None:
    """Let Triton, which reads the environment at each compilation, keep its kernels in ``folder``."""
    os.environ[_KERNELS] = str(folder)


def config_home() -> Path:
    """Return the user's folder for configuration, in which systemd looks for units of this user."""
    return _base_folder("XDG_CONFIG_HOME", "~/.config")


def _base_folder(variable: str, usual: str) -> Path:
    named = os.environ.get(variable, "")
    # The specification demands to ignore a relative path.
    return Path(named) if Path(named).is_absolute() else Path(usual).expanduser()


def token_folder() -> Path:
    """Return the folder in which ``convoy open`` leaves tokens for the heads of this user."""
    return default_cache() / "open"


def invitation_folder() -> Path:
    """Return the folder in which ``convoy invite`` leaves its questions for the heads of this user."""
    return default_cache() / "invitations"


def make_own_folder(folder: Path) -> None:
    """Make a folder of this user alone. Raises `ConfigError` as `check_own_folder`, and `OSError`."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_own_folder(folder)


def check_own_folder(folder: Path) -> None:
    """Raise `ConfigError` unless this user alone may enter ``folder``. Raises `OSError` if it is missing."""
    found = os.lstat(folder)
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or mode & 0o077:
        raise ConfigError(
            f"{folder} has mode {mode:04o} and owner {found.st_uid}, expected 0700 and {os.getuid()}",
            hint="remove it: the next command makes it anew",
        )
