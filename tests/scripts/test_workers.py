"""`--workers` of `make test`: every outcome is told, and a file keeps its fixtures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = """
import os
import pytest

@pytest.fixture(scope="session")
def session(tmp_path_factory):
    yield tmp_path_factory.getbasetemp()
    print(f"<the session of {os.getpid()} ends>")

@pytest.fixture(scope="module")
def made():
    return []
"""
# Two files for one worker, as the other one has the file that never ends by itself.
FILES = {
    "test_a.py": """
import pytest, warnings
def test_one(made, session):
    made.append(session)
def test_two(made, session):
    assert made == [session]
    warnings.warn("look here")
@pytest.mark.skip(reason="not here")
def test_three(): ...
""",
    "test_b.py": """
import os, signal
def test_before(): ...
def test_killed(): os.kill(os.getpid(), signal.SIGKILL)
def test_behind(): ...
""",
    "test_c.py": """
def test_wrong():
    print("said to the end")
    assert {"one": 1} == {"one": 2}
def test_last(session):
    assert session.name.startswith("worker-")
""",
}


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "support.workers", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "PYTEST_DEBUG_TEMPROOT": str(folder)}
    return subprocess.run(
        [*command, "--rootdir", ".", "--workers", "2", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_outcome_is_told_also_of_a_worker_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    done = run(tmp_path, "-rA")
    assert done.returncode == 1, done.stdout + done.stderr
    told = {
        line.partition(" - ")[0] for line in done.stdout.splitlines() if line.startswith(("PASSED", "FAILED"))
    }
    assert told == {
        "PASSED test_a.py::test_one",
        "PASSED test_a.py::test_two",
        "PASSED test_b.py::test_before",
        "FAILED test_b.py::test_killed",
        "FAILED test_b.py::test_behind",
        "FAILED test_c.py::test_wrong",
        "PASSED test_c.py::test_last",
    }
    assert "the worker that ran it ended with status -9" in done.stdout
    assert "the worker that had it ended before it" in done.stdout
    assert "SKIPPED [1] test_a.py:8: not here" in done.stdout
    assert "said to the end" in done.stdout
    assert "UserWarning: look here" in done.stdout
    assert done.stdout.count("the session of") == 1, "the fixture of the killed worker has no end"


def test_errors_of_the_collection_and_threads_of_an_import_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import nowhere\n")
    done = run(tmp_path)
    assert done.returncode == 2
    assert "No module named 'nowhere'" in done.stdout
    (tmp_path / "test_broken.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "def test_one(): ...\n"
    )
    done = run(tmp_path)
    assert done.returncode == 4
    assert "--workers: a test file started threads" in done.stderr
