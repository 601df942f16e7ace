"""What `make setup` installs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_set_up_installs_what_the_locks_name_by_hash_and_resolves_nothing(tmp_path: Path) -> None:
    make = shutil.which("make")
    assert make is not None
    # -n prints the recipe without running it. There is no stamp in this environment's folder.
    done = subprocess.run(
        [make, "-n", f"VENV={tmp_path / 'venv'}", "setup"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    installs = re.findall(r"-m pip install ([^>&;|}]*)", done.stdout)
    assert len(installs) == 4, done.stdout
    for install in installs:
        flags = install.split()
        assert "--no-deps" in flags
        assert ("--require-hashes" in flags) == ("-r" in flags)
    (own,) = [install.split() for install in installs if "-r" not in install.split()]
    assert own[-2:] == ["--editable", "."]
    assert {lock for install in installs for lock in re.findall(r"-r (\S+)", install)} == {
        *("requirements.lock", "requirements-dev.lock", "requirements-cpu.lock", "requirements-cuda.lock")
    }
