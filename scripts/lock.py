"""Write and check the lock files: every dependency with its exact version and the hashes of its files.

``requirements.lock`` holds the dependencies of the package and of its extras. ``requirements-dev.lock``
holds the tools of contributors and the build backend. ``requirements-cuda.lock`` holds the packages that only
a CUDA build of torch needs; ``make setup`` installs it beside such a build. ``requirements-cpu.lock`` names
the CPU build of torch, which ``make setup`` takes wherever pip is told of an index that has it.
``requirements-docs.lock`` holds everything that ``make docs`` installs, into an environment of its own.
``requirements-mlx.lock`` holds MLX, which has wheels for few systems; ``make test-mlx`` installs it.

    python scripts/lock.py              resolve anew; a pinned version stays as long as it fits
    python scripts/lock.py --upgrade    resolve anew, with the newest versions
    python scripts/lock.py --docs       resolve anew what the documentation and MLX need, and nothing else
    python scripts/lock.py --check      compare the locks with pyproject.toml; needs no network
    python scripts/lock.py --macs       look up a wheel for Macs of every locked package; installs nothing

The package index does not hold CPU builds of torch. ``--add-wheel FILE`` adds the hash of one to
requirements-cpu.lock and to requirements.lock. It stays there as long as the version of torch does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
LOCK, DEV_LOCK = "requirements.lock", "requirements-dev.lock"
CUDA_LOCK, CPU_LOCK = "requirements-cuda.lock", "requirements-cpu.lock"
DOCS_LOCK, MLX_LOCK = "requirements-docs.lock", "requirements-mlx.lock"
LOCKS = (LOCK, DEV_LOCK, CUDA_LOCK, CPU_LOCK, DOCS_LOCK, MLX_LOCK)
CPU_BUILD = "torch"
DEV_EXTRA = "dev"
# The extras with a lock of their own, by its name.
APART = {DOCS_LOCK: "docs", MLX_LOCK: "mlx"}
# MLX has wheels for this macOS and later ones.
MACOS, MAC_PYTHONS = "14.0", ("3.11", "3.12", "3.13")
# The editable install of the project needs this beside the build backend.
EDITABLE_BUILD = ("editables",)
CUDA_ONLY = re.compile(r"(?:nvidia-|cuda-|triton\b)")
DIGEST_PREFIX = "# dependencies of pyproject.toml: sha256:"


@dataclass(frozen=True)
class Pin:
    """Hold one locked package: ``line`` is the requirement with its marker, ``hashes`` are those of its
    files.
    """

    line: str
    hashes: tuple[str, ...] = field(default=())

    @property
    def name(self) -> str:
        return canonicalize_name(Requirement(self.line).name)

    @property
    def version(self) -> str:
        return next(iter(Requirement(self.line).specifier)).version

    def text(self) -> str:
        return " \\\n    ".join([self.line, *(f"--hash={one}" for one in self.hashes)]) + "\n"


def parse(text: str) -> dict[str, Pin]:
    """Return the pins of a requirements file by canonical name."""
    pins = {}
    for entry in re.split(r"\n(?=\S)", text.replace("\\\n", " ")):
        if not entry.strip() or entry.startswith("#"):
            continue
        line, *hashes = re.split(r"\s+--hash=", entry.strip())
        pin = Pin(line.strip(), tuple(one.strip() for one in hashes))
        pins[pin.name] = pin
    return pins


def requirements_of(project: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the requirements for users, all extras included, and those for contributors."""
    table = project["project"]
    extras = table["optional-dependencies"]
    apart = {DEV_EXTRA, *APART.values()}
    users = [
        *table["dependencies"],
        *(line for name, lines in extras.items() if name not in apart for line in lines),
    ]
    return users, [*extras[DEV_EXTRA], *project["build-system"]["requires"], *EDITABLE_BUILD]


def apart_requirements_of(project: Mapping[str, Any], lock: str) -> list[str]:
    """Return the requirements of an extra with a lock of its own."""
    return list(project["project"]["optional-dependencies"][APART[lock]])


def digest_of(project: Mapping[str, Any]) -> str:
    """Return the SHA-256 of everything in pyproject.toml that the locks of the package follow from."""
    users, developers = requirements_of(project)
    return _digest([project["project"]["requires-python"], sorted(users), sorted(developers)])


def apart_digest_of(project: Mapping[str, Any], lock: str) -> str:
    """Return the SHA-256 of everything in pyproject.toml that an extra's own lock follows from."""
    return _digest([project["project"]["requires-python"], sorted(apart_requirements_of(project, lock))])


def _digest(parts: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def read_locks(root: Path) -> dict[str, dict[str, Pin]]:
    """Return the pins of each lock file; a missing file has none."""
    files = {name: root / name for name in LOCKS}
    return {name: parse(_text(file)) for name, file in files.items()}


def problems(project: Mapping[str, Any], root: Path) -> list[str]:
    """Return the faults of the lock files in ``root``, a sentence each."""
    found = address_problems(root)
    if found:
        return found
    for name in LOCKS:
        digest = apart_digest_of(project, name) if name in APART else digest_of(project)
        text = _text(root / name)
        if f"{DIGEST_PREFIX}{digest}" not in text.splitlines():
            found.append(f"{name} was made from other dependencies than pyproject.toml has now")
    locks = read_locks(root)
    for name, pins in locks.items():
        found += [f"{name}: {pin.line} has no hash" for pin in pins.values() if not pin.hashes]
    users, developers = requirements_of(project)
    found += unmet(users, locks[LOCK], LOCK)
    found += unmet(developers, {**locks[LOCK], **locks[DEV_LOCK]}, DEV_LOCK)
    for name in APART:
        found += unmet(apart_requirements_of(project, name), locks[name], name)
    return found


def address_problems(root: Path) -> list[str]:
    """Return the locks that name an address to install from, a sentence each."""
    return [
        f"{name} holds an address or an option, expected packages only"
        for name in LOCKS
        if re.search(r"://|^-", _text(root / name), re.MULTILINE)
    ]


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.exists() else ""


def unmet(lines: Iterable[str], pins: Mapping[str, Pin], lock: str) -> list[str]:
    """Return the requirements that no pin satisfies, a sentence each."""
    found = []
    for line in lines:
        wanted = Requirement(line)
        pin = pins.get(canonicalize_name(wanted.name))
        if pin is None:
            found.append(f"{lock} does not hold {wanted.name}")
        elif not wanted.specifier.contains(pin.version, prereleases=True):
            found.append(f"{lock} holds {wanted.name} {pin.version}, expected {wanted.specifier}")
    return found


def resolve(requirements: Sequence[str], python: str, preferred: Mapping[str, Pin]) -> dict[str, Pin]:
    """Return pins for ``requirements`` and all that they need, for every platform. Runs uv."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, out = Path(folder, "requirements.in"), Path(folder, "requirements.txt")
        wanted.write_text("\n".join(requirements) + "\n", encoding="utf-8")
        # uv keeps the versions of an output file that exists.
        out.write_text("".join(pin.text() for pin in preferred.values()), encoding="utf-8")
        command = ["uv", "pip", "compile", str(wanted), "--universal", "--generate-hashes", "--no-header"]
        command += ["--no-annotate", "--quiet", "--python-version", python, "--output-file", str(out)]
        subprocess.run(command, check=True)
        return parse(out.read_text(encoding="utf-8"))


def without_mac_wheels(project: Mapping[str, Any], root: Path) -> list[str]:
    """Return a sentence for each Python for which a locked package has no wheel on arm64 macOS. Runs uv.

    It reads the registry's metadata of the versions in the locks, and installs nothing.
    """
    locks, found = read_locks(root), []
    pins = {**locks[MLX_LOCK], **locks[LOCK]}
    users, _ = requirements_of(project)
    with tempfile.TemporaryDirectory() as folder:
        wanted, bounds = Path(folder, "requirements.in"), Path(folder, "constraints.txt")
        wanted.write_text("\n".join([*users, *apart_requirements_of(project, MLX_LOCK)]), encoding="utf-8")
        bounds.write_text("\n".join(pin.line for pin in pins.values()), encoding="utf-8")
        for python in MAC_PYTHONS:
            command = ["uv", "pip", "compile", str(wanted), "--constraint", str(bounds), "--quiet"]
            command += ["--only-binary", ":all:", "--python-platform", "aarch64-apple-darwin"]
            environment = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": MACOS}
            done = subprocess.run(
                [*command, "--python-version", python],
                check=False,
                capture_output=True,
                text=True,
                env=environment,
            )
            packages = [line for line in done.stdout.splitlines() if re.match(r"[a-z]", line)]
            print(f"macOS {MACOS}, Python {python}: {len(packages)} packages have a wheel")
            if done.returncode:
                found.append(f"Python {python} on macOS {MACOS}: {' '.join(done.stderr.split())[:600]}")
    return found


def cpu_build(pin: Pin, old: Pin | None, wheels: Iterable[Path]) -> Pin:
    """Return the pin of the CPU build of ``pin``, with the hashes of ``wheels`` and of the ``old`` pin."""
    line = f"{pin.name}=={pin.version}+cpu"
    hashes = set(old.hashes) if old is not None and old.line == line else set()
    for wheel in wheels:
        name, version, _, _ = parse_wheel_filename(wheel.name)
        if line != f"{name}=={version}":
            raise SystemExit(f"error: {wheel.name} is not {line}")
        with wheel.open("rb") as file:
            hashes.add("sha256:" + hashlib.file_digest(file, "sha256").hexdigest())
    return Pin(line, tuple(sorted(hashes)))


def write_locks(project: Mapping[str, Any], root: Path, *, upgrade: bool, wheels: Sequence[Path]) -> None:
    """Resolve the dependencies and write the lock files."""
    locks = read_locks(root)
    cpu = locks.pop(CPU_LOCK)
    locks = {name: pins for name, pins in locks.items() if name not in APART}
    preferred = {} if upgrade else {name: pin for pins in locks.values() for name, pin in pins.items()}
    python = _oldest_python(project)
    users, developers = requirements_of(project)
    all_pins = resolve([*users, *developers], python, preferred)
    cpu_pin = cpu_build(all_pins[CPU_BUILD], cpu.get(CPU_BUILD), wheels)
    torch = all_pins[CPU_BUILD]
    all_pins[CPU_BUILD] = Pin(torch.line, tuple(sorted({*torch.hashes, *cpu_pin.hashes})))
    # The second resolution prefers the versions of the first, so that both locks install together.
    for_users = resolve(users, python, all_pins)
    cuda = {name for name in all_pins if CUDA_ONLY.match(name)}
    parts = {
        LOCK: [name for name in for_users if name not in cuda],
        DEV_LOCK: [name for name in all_pins if name not in for_users and name not in cuda],
        CUDA_LOCK: sorted(cuda),
    }
    pins = {name: [all_pins[one] for one in names] for name, names in parts.items()}
    for name, held in {**pins, CPU_LOCK: [cpu_pin]}.items():
        _write(root / name, digest_of(project), held)


def write_apart_lock(project: Mapping[str, Any], root: Path, lock: str, *, upgrade: bool) -> None:
    """Resolve the requirements of an extra with a lock of its own, and write that.

    Packages of the other locks keep their versions.
    """
    locks = read_locks(root)
    old = [lock] if not upgrade else []
    preferred = {name: pin for file in (*old, DEV_LOCK, LOCK) for name, pin in locks[file].items()}
    pins = resolve(apart_requirements_of(project, lock), _oldest_python(project), preferred)
    _write(root / lock, apart_digest_of(project, lock), list(pins.values()))


def _oldest_python(project: Mapping[str, Any]) -> str:
    return str(re.findall(r"\d+\.\d+", project["project"]["requires-python"])[0])


def _write(file: Path, digest: str, pins: Sequence[Pin]) -> None:
    header = f"# Made by scripts/lock.py; do not edit.\n{DIGEST_PREFIX}{digest}\n"
    file.write_text(header + "".join(pin.text() for pin in pins), encoding="utf-8")
    print(f"{file.name}: {len(pins)} packages")


def main() -> int:
    parser = argparse.ArgumentParser(description="Write or check the lock files.")
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 if a lock is not current")
    parser.add_argument("--macs", action="store_true", help="look up wheels for Macs; changes nothing")
    parser.add_argument("--docs", action="store_true", help="resolve only for documentation and MLX")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    parser.add_argument("--add-wheel", type=Path, action="append", default=[], metavar="FILE")
    args = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if args.macs:
        missing = without_mac_wheels(project, ROOT)
        for line in missing:
            print(f"error: {line}", file=sys.stderr)
        return 1 if missing else 0
    if not args.check and not args.docs:
        write_locks(project, ROOT, upgrade=args.upgrade, wheels=args.add_wheel)
    if not args.check:
        for name in APART:
            write_apart_lock(project, ROOT, name, upgrade=args.upgrade)
    found = problems(project, ROOT)
    for line in found:
        print(f"error: {line}", file=sys.stderr)
    if found:
        print("hint: run `make lock`, read the difference and commit it", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
