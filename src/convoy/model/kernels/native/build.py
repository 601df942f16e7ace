"""Find the compiled C sources: shipped in the wheel, or compiled once into the user's cache.

The loaded code runs as this process. What is compiled here is only ever taken from a directory that no
other user may write to, under a name that is the digest of the sources, the options and the compiler's
version. A wheel's files lie beside the modules that load them, under the digest of sources and options: a
file of other sources is not found.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from convoy.errors import SelfCheckError

_HERE = Path(__file__).parent
PREBUILT = _HERE / "prebuilt"


@dataclass(frozen=True)
class InstructionSet:
    """Describe an instruction set for which the C files are compiled, and the CPU features that it needs."""

    name: str
    # Of `MACHINES`.
    machine: str
    # By Linux's names.
    needed: tuple[str, ...]
    # The compiler's option for all features; empty: one option for each.
    architecture: str = ""
    # The folder of the wheel's files.
    shipped_in: Path = PREBUILT

    @property
    def options(self) -> tuple[str, ...]:
        """Return the compiler's options, for a library and for a program."""
        if self.architecture:
            return (*_OPTIONS, self.architecture)
        return (*_OPTIONS, *(f"-m{name.replace('_', '')}" for name in self.needed))

    @property
    def digest(self) -> bytes:
        """Return the SHA-256 of the sources and the options."""
        texts = [path.read_bytes() for path in (*SOURCES, *(_HERE / name for name in _HEADERS))]
        return hashlib.sha256(b"\0".join((*texts, " ".join((*_SHARED, *self.options)).encode()))).digest()

    @property
    def prebuilt(self) -> Path:
        """Return the place of the wheel's file, which exists in a wheel for this platform alone."""
        return self.shipped_in / f"kernels-{self.digest.hex()[:32]}.so"


# The names of processors, by what `platform.machine` calls them.
MACHINES = {"x86_64": "x86-64", "aarch64": "arm64", "arm64": "arm64"}
# All have the same functions with the same bits.
AVX512 = InstructionSet(
    "AVX-512", "x86-64", ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "fma")
)
AVX2 = InstructionSet("AVX2", "x86-64", ("avx2", "fma", "f16c"))
NEON_I8MM = InstructionSet(
    "NEON with i8mm", "arm64", ("asimd", "asimddp", "i8mm"), "-march=armv8.2-a+dotprod+i8mm"
)
NEON_DOT = InstructionSet("NEON with dot products", "arm64", ("asimd", "asimddp"), "-march=armv8.2-a+dotprod")
NEON = InstructionSet("NEON", "arm64", ("asimd",), "-march=armv8-a")
# Best first, of each processor.
INSTRUCTION_SETS = (AVX512, AVX2, NEON_I8MM, NEON_DOT, NEON)
SOURCES = tuple(
    _HERE / f"{name}.c"
    for name in (
        *("kernels", "layers", "stored", "codes", "int8"),
        *("attention", "activation", "rounding", "batch", "threads"),
    )
)
_HEADERS = (
    *("shared.h", "kernels.h", "ranges.h", "int8.h", "exp.h", "activation.h", "attention.h"),
    *("vector.h", "vector_avx512.h", "vector_avx2.h", "vector_neon.h"),
)
# Features that some Macs of ARM lack, by the names of macOS. All have the others.
_MAC_FEATURES = {"i8mm": "FEAT_I8MM"}
FOLDER = Path("~/.cache/convoy/native")
# No contraction: torch rounds a product and a sum separately, so they must stay two operations. No
# -march=native: several machines may share a home directory.
_OPTIONS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-pthread")
_SHARED = ("-fPIC", "-shared")
_COMPILERS = ("cc", "gcc", "clang")
# It only ends a compiler that hangs: a busy or small machine takes minutes.
_COMPILE_S = 900


@functools.cache
def built_library(of: InstructionSet) -> Path:
    """Return the path of the library for an instruction set: the wheel's, or the one compiled here.

    Raises SelfCheckError with the reason why this machine has none.
    """
    missing = missing_features(of)
    if missing:
        raise SelfCheckError(f"this machine has no {', '.join(missing)}")
    if of.prebuilt.exists():
        return of.prebuilt
    compiler = find_compiler()
    if compiler is None:
        raise SelfCheckError("no C compiler was found", hint=f"install one of {', '.join(_COMPILERS)}")
    try:
        folder = FOLDER.expanduser()
    except RuntimeError as error:
        raise SelfCheckError("this user has no home directory for the compiled library") from error
    return compile_into(folder, compiler, of)


def find_compiler() -> str | None:
    """Return the path of a C compiler, or None."""
    return next((found for name in _COMPILERS if (found := shutil.which(name))), None)


def own_sets(machine: str | None = None) -> tuple[InstructionSet, ...]:
    """Return the instruction sets of a processor, best first. ``machine`` None means this one's."""
    machine = platform.machine() if machine is None else machine
    return tuple(one for one in INSTRUCTION_SETS if one.machine == MACHINES.get(machine))


def best_built() -> InstructionSet | None:
    """Return the best instruction set that has a library here, or None. It does not load the library."""
    for one in own_sets():
        try:
            built_library(one)
        except SelfCheckError:
            continue
        return one
    return None


def missing_features(
    of: InstructionSet, info: Path = Path("/proc/cpuinfo"), sysctl: Path = Path("/usr/sbin/sysctl")
) -> list[str]:
    """Return the features that an instruction set's code needs and this machine lacks.

    Linux tells them in ``info``, and macOS through ``sysctl``. On a processor of another kind the result
    names only that.
    """
    if MACHINES.get(platform.machine()) != of.machine:
        return [f"processor of {of.machine}"]
    if (sys.platform, of.machine) == ("darwin", "arm64"):
        asked = {name: told for name, told in _MAC_FEATURES.items() if name in of.needed}
        return [name for name, told in asked.items() if not _mac_has(told, sysctl)]
    if sys.platform != "linux":
        return ["Linux"]
    try:
        lines = info.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return ["readable list of CPU features"]
    # The first processor's flags: the processors of one machine are alike. ARM calls them features.
    told = (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
    flags = next(told, [])
    return [name for name in of.needed if name not in flags]


def _mac_has(feature: str, sysctl: Path) -> bool:
    """Return whether macOS says that the processor has a feature. It may not know its name."""
    command = [str(sysctl), "-n", f"hw.optional.arm.{feature}"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.stdout.strip() == b"1"


def compile_into(folder: Path, compiler: str, of: InstructionSet) -> Path:
    """Return the library's path in ``folder``, after compiling it if it is missing. Raises SelfCheckError."""
    folder = own_folder(folder)
    try:
        version = _version(compiler)
        named = hashlib.sha256(b"\0".join((of.digest, compiler.encode(), version)))
        place = folder / f"kernels-{named.hexdigest()[:32]}.so"
        if not place.exists():
            with _alone(folder):
                if not place.exists():
                    compile_to(place, [compiler], of)
        require_own(place)
    except OSError as error:
        raise SelfCheckError(f"{folder} cannot be used: {(error.strerror or 'unusable').lower()}") from error
    return place


def own_folder(folder: Path) -> Path:
    """Return ``folder`` without links, after making it if it is missing.

    Raises SelfCheckError if another user can write to it.
    """
    try:
        for path in reversed((folder, *folder.parents)):
            if not path.exists():
                # Every new parent too, because a umask may let a group write.
                path.mkdir(mode=0o700, exist_ok=True)
        require_own(folder)
    except OSError as error:
        raise SelfCheckError(f"{folder} cannot be used: {(error.strerror or 'unusable').lower()}") from error
    # Use the directory that was checked, and not a link to it that may change.
    return folder.resolve()


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait while another process compiles: the members of one machine start together, and need the same."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # A file system without locks has each compile for itself.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@functools.cache
def _version(compiler: str) -> bytes:
    """Return what a compiler says of itself. Raises SelfCheckError."""
    return _run([compiler, "--version"])


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


def compile_to(place: Path, compiler: Sequence[str], of: InstructionSet) -> None:
    """Compile under another name, then rename the file. Two processes may compile at the same time.

    ``compiler`` is a program, and arguments that come first.
    Neither process then loads half a file. The file is synced before the rename, and the directory after
    it, so that a power loss leaves no partial file. Raises SelfCheckError and OSError.
    """
    handle, name = tempfile.mkstemp(suffix=".part", dir=place.parent)
    os.close(handle)
    half = Path(name)
    try:
        with tempfile.TemporaryDirectory(dir=place.parent) as folder:
            objects = _compile_each(Path(folder), compiler, of)
            _run([*compiler, *_SHARED, *of.options, "-o", str(half), *objects, "-lm"])
        half.chmod(0o500)
        _sync(half)
        half.replace(place)
        _sync(place.parent)
    finally:
        half.unlink(missing_ok=True)


def _compile_each(folder: Path, compiler: Sequence[str], of: InstructionSet) -> list[str]:
    """Compile each source to a file in ``folder``, some side by side: a user's first start waits for it.

    Returns the files. Raises SelfCheckError.
    """

    def made(source: Path) -> str:
        to = str(folder / f"{source.stem}.o")
        _run([*compiler, "-fPIC", *of.options, "-c", "-o", to, str(source)])
        return to

    with ThreadPoolExecutor(os.cpu_count()) as runs:
        return list(runs.map(made, sorted(SOURCES, key=lambda one: -one.stat().st_size)))


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
