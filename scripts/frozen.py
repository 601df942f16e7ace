"""Compare a frozen commit with the present tree: everything that a person, a peer or a tool observes must be
equal.

    python scripts/frozen.py [--frozen COMMIT] [--only KIND...] [--names FILE] [--keep FOLDER]

Kinds: wire, frames, cli, types, files, http, metrics, logits. Each side runs in processes of its own, with
PYTHONPATH on its own src and tests, and the same python. Exit code 1: a fact differs, and the table names the
first ones. FILE, scripts/frozen_names.toml, maps names of the frozen tree to those of the present one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FROZEN = "00294a3fca7c7c1a0303eb0fb0b371e6cc4c4c3c"
NAMES_FILE = ROOT / "scripts" / "frozen_names.toml"
KINDS = ("wire", "frames", "cli", "types", "files", "http", "metrics", "logits")
# Files of vectors: the old ones must stay, and others may come.
_MAY_GROW = "vectors "
# Differences of each kind.
_SHOWN = 8


@contextmanager
def worktree(commit: str, folder: Path) -> Iterator[Path]:
    """Check ``commit`` out beside the repository, and remove the checkout at the end."""
    place = folder / "frozen"
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(place), commit], check=True)
    try:
        yield place
    finally:
        subprocess.run([*git, "remove", "--force", str(place)], check=True)


def start(root: Path, kinds: list[str], names: Mapping[str, str], folder: Path) -> subprocess.Popen[bytes]:
    """Start the probe of one side; its facts and its log go to ``folder``."""
    side = folder.name
    paths = [root / "src", root / "tests", ROOT / "scripts"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "HOME": str(folder / "home"),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    command = [sys.executable, str(ROOT / "scripts" / "frozen_probe.py"), *kinds, "--root", str(root)]
    command += ["--names", json.dumps(dict(names)), "--models", str(folder.parent / "models")]
    command += ["--out", str(folder / f"{'-'.join(kinds)}.json")]
    (folder / "home").mkdir(parents=True, exist_ok=True)
    with (folder / f"{side}.log").open("ab") as log:
        return subprocess.Popen(command, cwd=root, env=environment, stdout=log, stderr=log)


def facts_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the facts that the probes of one side wrote, by kind."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        found |= json.loads(path.read_text(encoding="utf-8"))
    return found


def differences(
    frozen: Mapping[str, Any], present: Mapping[str, Any], added: Collection[str] = ()
) -> list[str]:
    """Return a line for each fact that is missing, new or not equal; ``added`` ones are new on purpose."""
    found = [f"only in the frozen tree: {name}" for name in frozen if name not in present]
    new = [name for name in present if name not in {*frozen, *added} and not name.startswith(_MAY_GROW)]
    found += [f"only in the present tree: {name}" for name in new]
    for name, value in frozen.items():
        if name in present and value != present[name]:
            found.append(f"{name}: {_first_difference(value, present[name])}")
    return found


def _first_difference(one: Any, other: Any, where: str = "") -> str:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *other]:
            if one.get(key, "nothing") != other.get(key, "nothing"):
                return _first_difference(one.get(key, "nothing"), other.get(key, "nothing"), f"{where}.{key}")
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            if left != right:
                return _first_difference(left, right, f"{where}[{index}]")
    return f"{where} {json.dumps(one)[:160]} became {json.dumps(other)[:160]}".strip()


def renamed(facts: Mapping[str, Any], words: Mapping[str, str]) -> dict[str, Any]:
    """Return the frozen facts with the names that ``words`` changes on purpose."""
    if not words:
        return dict(facts)
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, words))})\b")
    found: dict[str, Any] = json.loads(
        pattern.sub(lambda match: words[match.group()], json.dumps(dict(facts)))
    )
    return found


def read_names(path: Path) -> dict[str, dict[str, str]]:
    """Return the tables of the file of names: where definitions lie, and words of facts by kind."""
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def collect(frozen: Path, kinds: list[str], names: Mapping[str, str], folder: Path) -> None:
    """Run the probes of both sides beside each other. Raises RuntimeError if one ended early."""
    sides = {"frozen": (frozen, {}), "present": (ROOT, names)}
    for side in sides:
        (folder / side).mkdir()
    (folder / "models").mkdir()
    wanted = [kind for kind in kinds if kind not in {"http", "metrics"}]
    wanted += ["served"] if {"http", "metrics"} & set(kinds) else []
    if "logits" in wanted:
        _wait(start(frozen, ["models"], {}, folder / "frozen"), folder / "frozen")
    running = {side: start(root, wanted, mapped, folder / side) for side, (root, mapped) in sides.items()}
    for side, process in running.items():
        _wait(process, folder / side)


def _wait(process: subprocess.Popen[bytes], folder: Path) -> None:
    if process.wait():
        log = (folder / f"{folder.name}.log").read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(f"the probe of the {folder.name} tree ended: {log[-2000:]}")


def main(arguments: list[str] | None = None) -> int:
    """Print a row for each kind and the first differences. Return 1 if there are any."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frozen", default=FROZEN, metavar="COMMIT")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--names", type=Path, default=NAMES_FILE, metavar="FILE")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="Leave facts and logs here.")
    given = parser.parse_args(arguments)
    tables = read_names(given.names)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="frozen-") as name:
        folder = (given.keep or Path(name) / "facts").absolute()
        folder.mkdir(parents=True)
        with worktree(given.frozen, Path(name)) as frozen:
            collect(frozen, given.only, tables.get("places", {}), folder)
        sides = facts_of(folder / "frozen"), facts_of(folder / "present")
    is_equal = report(sides, given.only, tables)
    print(f"{time.monotonic() - began_s:.0f} s")
    return 0 if is_equal else 1


def report(
    sides: tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]],
    kinds: list[str],
    tables: Mapping[str, Mapping[str, str]],
) -> bool:
    """Print the table; return whether all facts are equal."""
    print(f"{'kind':10}{'facts':>9}{'equal':>9}{'different':>11}")
    total = 0
    for kind in kinds:
        frozen, present = (side.get(kind, {"the probe failed": "it gave no facts"}) for side in sides)
        frozen = renamed(frozen, {**tables.get("words", {}), **tables.get(f"words_{kind}", {})})
        found = differences(frozen, present, tables.get(f"added_{kind}", {}))
        failed = [
            f"{facts['the probe failed']}" for facts in (frozen, present) if "the probe failed" in facts
        ]
        found = failed or found
        num_facts = len(frozen)
        num_equal = sum(name in present and present[name] == value for name, value in frozen.items())
        print(f"{kind:10}{num_facts:9}{num_equal:9}{len(found):11}")
        for line in found[:_SHOWN]:
            print(f"    {line}")
        if len(found) > _SHOWN:
            print(f"    and {len(found) - _SHOWN} more")
        total += len(found)
    return total == 0


if __name__ == "__main__":
    sys.exit(main())
