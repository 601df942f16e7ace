"""Compile the C sources once, into the user's cache, and return the place of the result.

The loaded code runs as this process. It is therefore only ever taken from a directory that no other user
may write to, under a name that is the digest of the sources, the options and the compiler's version.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from convoy.errors import SelfCheckError

SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.c", "stored.c"))
_HEADERS = tuple(Path(__file__).with_name(name) for name in ("shared.h", "vector.h"))
FOLDER = Path("~/.cache/convoy/native")
# CPU features, by Linux's names.
NEEDED = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "fma")
# No contraction: torch rounds a product and a sum separately, so they must stay two operations. No
# -march=native: several machines may share a home directory.
_OPTIONS = (
    *("-std=gnu11", "-O3", "-fPIC", "-shared", "-ffp-contract=off"),
    *(f"-m{name.replace('_', '')}" for name in NEEDED),
)
_COMPILERS = ("cc", "gcc", "clang")
_COMPILE_S = 180


@functools.cache
def built_library() -> Path:
    """Return the path of the compiled library.

    Raises SelfCheckError with the reason why this machine has none.
    """
    missing = missing_features()
    if missing:
        raise SelfCheckError(f"this machine has no {', '.join(missing)}")
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise SelfCheckError("no C compiler was found", hint=f"install one of {', '.join(_COMPILERS)}")
    try:
        folder = FOLDER.expanduser()
    except RuntimeError as error:
        raise SelfCheckError("this user has no home directory for the compiled library") from error
    return compile_into(folder, compiler)


def missing_features(info: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Return the features that the kernels need and this machine lacks.

    On anything but x86-64 Linux the result names only that.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return ["x86-64 Linux"]
    try:
        lines = info.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return ["readable list of CPU features"]
    # The first processor's flags: the processors of one machine are alike.
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return [name for name in NEEDED if name not in flags]


def compile_into(folder: Path, compiler: str) -> Path:
    """Return the library's path in ``folder``, after compiling it if it is missing. Raises SelfCheckError."""
    try:
        for path in reversed((folder, *folder.parents)):
            if not path.exists():
                # Every new parent too, because a umask may let a group write.
                path.mkdir(mode=0o700, exist_ok=True)
        require_own(folder)
        # Use the directory that was checked, and not a link to it that may change.
        folder = folder.resolve()
        version = _run([compiler, "--version"])
        options = " ".join(_OPTIONS).encode()
        texts = [path.read_bytes() for path in (*SOURCES, *_HEADERS)]
        named = hashlib.sha256(b"\0".join((*texts, options, compiler.encode(), version)))
        place = folder / f"kernels-{named.hexdigest()[:32]}.so"
        if not place.exists():
            _compile(compiler, place)
        require_own(place)
    except OSError as error:
        raise SelfCheckError(f"{folder} cannot be used: {(error.strerror or 'unusable').lower()}") from error
    return place


def require_own(place: Path) -> None:
    """Raise SelfCheckError unless ``place`` belongs to this user and no other user can write or replace it.

    A directory above it may belong to the system, or be sticky, so that each user may only touch their own
    files.
    """
    own = place.resolve()
    if own != place.absolute() and place.is_symlink():
        raise SelfCheckError(f"{place} is a link")
    for number, path in enumerate((own, *own.parents)):
        found = path.lstat()
        if found.st_uid != os.geteuid() and (number == 0 or found.st_uid != 0):
            raise SelfCheckError(f"{path} belongs to another user")
        shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if shared and (number == 0 or not found.st_mode & stat.S_ISVTX):
            raise SelfCheckError(f"others may write to {path}", hint=f"chmod go-w {path}")


def _compile(compiler: str, place: Path) -> None:
    """Compile under another name, then rename the file. Two processes may compile at the same time.

    Neither then loads half a file. The file is synced before the rename, and the directory after it, so
    that a power loss leaves no partial file.
    """
    handle, name = tempfile.mkstemp(suffix=".part", dir=place.parent)
    os.close(handle)
    half = Path(name)
    try:
        _run([compiler, *_OPTIONS, "-o", str(half), *map(str, SOURCES), "-lm"])
        half.chmod(0o500)
        _sync(half)
        half.replace(place)
        _sync(place.parent)
    finally:
        half.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _run(command: list[str]) -> bytes:
    """Return the output of ``command``. Raises SelfCheckError."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMPILE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise SelfCheckError(f"{command[0]} took more than {_COMPILE_S} s") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        reason = said[0] if said else f"exit status {done.returncode}"
        raise SelfCheckError(f"{command[0]} could not compile {SOURCES[0].name}: {reason}")
    return done.stdout
