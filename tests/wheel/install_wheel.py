"""The wheel in an empty environment: what it needs, what it does without extras, and how it asks for one."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lock
from convoy.model.kernels.native.build import missing_features, own_sets
from support.page_examples import examples_of

ROOT = Path(__file__).resolve().parents[2]
OF_EXTRAS = {"alembic", "sqlalchemy", "websockets", "gguf", "zeroconf", "psycopg", "opentelemetry-sdk"}
OF_CONTRIBUTORS = {"pytest", "mypy", "ruff", "openai", "hypothesis"}


def closure_of(requirements: Sequence[str]) -> set[str]:
    """Return the names of all packages that ``requirements`` bring, from the packages installed here."""
    found: set[tuple[str, str]] = set()
    todo = [(Requirement(line), "") for line in requirements]
    while todo:
        requirement, of_extra = todo.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": of_extra}):
            continue
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) not in found:
                found.add((name, extra))
                needs = importlib.metadata.requires(name) or []
                todo += [(Requirement(line), extra) for line in needs]
    return {name for name, _ in found}


class Installed:
    """Hold an environment with the wheel and its base requirements alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "venv/bin"
        self._run(
            sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist"), cwd=ROOT
        )
        self._run(sys.executable, "-m", "venv", str(folder / "venv"))
        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
        names = closure_of(project["project"]["dependencies"])
        pins = [
            pin
            for file in (lock.LOCK, lock.CUDA_LOCK)
            for pin in lock.parse((ROOT / file).read_text("utf-8")).values()
            if pin.name in names
        ]
        base = folder / "base.lock"
        base.write_text("".join(pin.text() for pin in pins), encoding="utf-8")
        # As `make setup` does: a CPU build of torch where pip knows a place that has one.
        self.pip("--require-hashes", "-r", str(ROOT / lock.CPU_LOCK), check=False)
        self.pip("--require-hashes", "-r", str(base))
        (wheel,) = (folder / "dist").glob("*.whl")
        self.pip(str(wheel))

    def pip(self, *arguments: str, check: bool = True) -> None:
        """Install without resolving anything."""
        options = ("--disable-pip-version-check", "--no-deps", "-q")
        self._run(str(self.bin / "python"), "-m", "pip", "install", *options, *arguments, check=check)

    def python(self, program: str) -> subprocess.CompletedProcess[str]:
        """Run a program in an empty folder."""
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        (home / "program.py").write_text(program, encoding="utf-8")
        return self._run(str(self.bin / "python"), "program.py", cwd=home, check=False)

    def convoy(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the installed command in an empty folder."""
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        return self._run(str(self.bin / "convoy"), *arguments, cwd=home, check=False)

    def _run(
        self, *command: str, cwd: Path | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0 or not check, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("wheel"))


def test_the_demo_runs_from_the_wheel_alone(installed: Installed) -> None:
    done = installed.convoy("demo", "--json")
    assert done.returncode == 0, done.stderr


def test_the_wheel_has_its_types_and_neither_tests_nor_comparisons(installed: Installed) -> None:
    (wheel,) = (installed.folder / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "convoy/py.typed" in names
    assert {name.partition("/")[0] for name in names} == {
        "convoy",
        f"{wheel.name.split('-py3')[0]}.dist-info",
    }


def test_the_sdist_builds_the_same_wheel(installed: Installed) -> None:
    folder = installed.folder / "sdist"
    build = (sys.executable, "-m", "hatchling", "build")
    installed._run(*build, "-t", "sdist", "-d", str(folder), cwd=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    source = folder / archive.name.removesuffix(".tar.gz")
    installed._run(*build, "-t", "wheel", "-d", str(folder), cwd=source)
    (wheel,) = folder.glob("*.whl")
    (other,) = (installed.folder / "dist").glob("*.whl")
    assert wheel.name == other.name
    assert sorted(zipfile.ZipFile(wheel).namelist()) == sorted(zipfile.ZipFile(other).namelist())


@pytest.mark.skipif(
    not own_sets() or bool(missing_features(own_sets()[-1])), reason="no kernels for this machine"
)
def test_the_wheel_has_kernels_for_each_instruction_set_and_uses_them(installed: Installed) -> None:
    (wheel,) = (installed.folder / "dist").glob("*.whl")
    assert not wheel.name.endswith("-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    kernels = {Path(name).name for name in names if name.endswith(".so")}
    assert kernels == {one.prebuilt.name for one in own_sets()}
    program = "from convoy.model.kernels.native.library import native_library as a; print(a().description)"
    done = installed.python(program)
    assert done.stdout.endswith(", prebuilt\n"), done.stderr


def test_a_program_uses_the_python_api_of_the_wheel(installed: Installed) -> None:
    example = examples_of("python.md")[0]
    done = installed.python(example.code)
    assert (done.returncode, done.stdout) == (0, example.output), done.stderr


def test_mypy_checks_a_program_against_the_wheel(installed: Installed) -> None:
    program = installed.folder / "consumer.py"
    shutil.copy(ROOT / "tests/sdk/consumer.py", program)
    # No type of the public API is one of torch, which takes most of the time.
    settings = installed.folder / "mypy.ini"
    settings.write_text("[mypy]\n[mypy-torch.*,transformers.*]\nfollow_imports = skip\n", encoding="utf-8")
    options = ("--strict", "--follow-imports", "silent", "--config-file", str(settings))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            *options,
            "--python-executable",
            str(installed.bin / "python"),
            program,
        ],
        cwd=installed.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_no_package_of_an_extra_or_of_contributors_comes_with_it(installed: Installed) -> None:
    done = installed._run(str(installed.bin / "python"), "-m", "pip", "list", "--format", "freeze")
    names = {canonicalize_name(line.partition("==")[0]) for line in done.stdout.splitlines()}
    assert "torch" in names
    assert not names & (OF_EXTRAS | OF_CONTRIBUTORS)
    assert installed._run(str(installed.bin / "python"), "-m", "pip", "check").returncode == 0


@pytest.mark.parametrize("verb", ["coordinator", "proxy", "provide"])
def test_a_verb_of_the_fleet_names_the_extra_that_it_needs(installed: Installed, verb: str) -> None:
    needed = {"proxy": ["ws://127.0.0.1:9"], "provide": ["ws://127.0.0.1:9"]}.get(verb, [])
    done = installed.convoy(verb, *needed)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    if "is not installed" in done.stderr:
        assert "hint: install Convoy with its extra fleet: pip install 'WHEEL[fleet]'" in done.stderr
