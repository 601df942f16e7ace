"""Compile `kernels.c` once, into the user's cache, and say where the result lies.

What is loaded runs as this process, so it is only ever taken from a directory that nobody else may write to,
under a name that is the digest of the source, the options and the compiler's version.
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

SOURCE = Path(__file__).with_name("kernels.c")
FOLDER = Path("~/.cache/convoy/native")
NEEDED = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "fma")  # as Linux names them
# No contraction: a product and a sum that torch rounds apart stay two. No -march=native: a home may be shared
# by machines.
_OPTIONS = (
    *("-std=gnu11", "-O3", "-fPIC", "-shared", "-ffp-contract=off"),
    *(f"-m{name.replace('_', '')}" for name in NEEDED),
)
_COMPILERS = ("cc", "gcc", "clang")
_COMPILE_S = 60


@functools.cache
def built_library() -> Path:
    """Where the compiled library lies. SelfCheckError says why this machine has none."""
    missing = missing_features()
    if missing:
        raise SelfCheckError(f"this machine has no {', '.join(missing)}")
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise SelfCheckError("no C compiler was found", hint=f"install one of {', '.join(_COMPILERS)}")
    try:
        folder = FOLDER.expanduser()
    except RuntimeError as error:
        raise SelfCheckError("this user has no home directory to keep it in") from error
    return compile_into(folder, compiler)


def missing_features(info: Path = Path("/proc/cpuinfo")) -> list[str]:
    """What the kernels need and this machine does not have; on no x86-64 Linux that alone."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return ["x86-64 Linux"]
    try:
        lines = info.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return ["list of what its CPU can do"]
    # of the first processor; those of one machine are alike
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return [name for name in NEEDED if name not in flags]


def compile_into(folder: Path, compiler: str, source: Path = SOURCE) -> Path:
    """The library in ``folder``, compiled if it is not there. Raises SelfCheckError."""
    try:
        for path in reversed((folder, *folder.parents)):
            if not path.exists():
                path.mkdir(mode=0o700, exist_ok=True)  # all of them: a umask may let a group write
        require_own(folder)
        folder = folder.resolve()  # which was looked at, not a link to it that may change
        version = _run([compiler, "--version"])
        options = " ".join(_OPTIONS).encode()
        named = hashlib.sha256(b"\0".join((source.read_bytes(), options, compiler.encode(), version)))
        place = folder / f"kernels-{named.hexdigest()[:32]}.so"
        if not place.exists():
            _compile(compiler, source, place)
        require_own(place)
    except OSError as error:
        raise SelfCheckError(f"{folder} cannot be used: {(error.strerror or 'unusable').lower()}") from error
    return place


def require_own(place: Path) -> None:
    """Raises SelfCheckError unless ``place`` is this user's, and nobody else can write or replace it.

    A directory above it may be the system's, or one of many users where each may touch only what is theirs.
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


def _compile(compiler: str, source: Path, place: Path) -> None:
    """Under another name first: two processes may do this at once, and none loads half a file.

    On the disk before it has its name, and its name after that: no loss of power leaves less of it.
    """
    handle, name = tempfile.mkstemp(suffix=".part", dir=place.parent)
    os.close(handle)
    half = Path(name)
    try:
        _run([compiler, *_OPTIONS, "-o", str(half), str(source), "-lm"])
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
    """What it prints. Raises SelfCheckError."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMPILE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise SelfCheckError(f"{command[0]} took more than {_COMPILE_S} s") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        reason = said[0] if said else f"exit status {done.returncode}"
        raise SelfCheckError(f"{command[0]} could not compile {SOURCE.name}: {reason}")
    return done.stdout
