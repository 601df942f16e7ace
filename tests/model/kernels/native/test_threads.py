"""The threads of compiled code, for builds of torch without GNU OpenMP."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from convoy.model.kernels.native.build import SOURCES, find_compiler

COMPILER = find_compiler()


@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
def test_every_part_of_every_job_runs_once_from_several_callers_and_in_a_forked_process(
    tmp_path: Path,
) -> None:
    assert COMPILER is not None
    (threads,) = [path for path in SOURCES if path.name == "threads.c"]
    program, source = tmp_path / "program", Path(__file__).with_name("threads_test.c")
    options = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-pthread", f"-I{threads.parent}")
    subprocess.run([COMPILER, *options, "-o", program, source, threads], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout
