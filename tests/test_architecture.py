"""The rules of the house, held against this repository; tests/architecture/ proves what each one catches."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from architecture import imports, shape
from architecture.source import Module, load_modules, load_scripts

Rule = Callable[[list[Module]], list[str]]
ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src"


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    found = load_modules(SRC)
    assert len(found) > 10, f"found only {len(found)} modules under {SRC}"
    return found


@pytest.fixture(scope="module")
def scripts() -> list[Module]:
    return load_scripts(ROOT / "training")


def listed(violations: list[str]) -> str:
    return "\n" + "\n".join(violations)


@pytest.mark.parametrize(
    "rule",
    [
        imports.wrong_direction,
        imports.neighbours,
        imports.import_cycles,
        imports.reserved_imports,
        imports.reserved_codecs,
        imports.impure_modules,
        shape.prints,
        shape.environment_reads,
    ],
    ids=lambda rule: rule.__name__,
)
def test_the_package_keeps_the_rule(rule: Rule, modules: list[Module]) -> None:
    violations = rule(modules)
    assert not violations, listed(violations)


@pytest.mark.parametrize(
    "rule",
    [shape.long_modules, shape.long_functions, shape.banned_names, shape.unsafe_code],
    ids=lambda rule: rule.__name__,
)
def test_the_package_and_the_training_scripts_keep_the_rule(
    rule: Rule, modules: list[Module], scripts: list[Module]
) -> None:
    violations = rule(modules + scripts)
    assert not violations, listed(violations)


def test_every_pure_module_that_a_rule_names_exists(modules: list[Module]) -> None:
    names = {module.name for module in modules}
    assert {rule.prefix for rule in imports.PURE} <= names


def test_no_text_names_a_path_of_some_machine() -> None:
    folders = [ROOT / name for name in ("src", "tests", "training", "docs", "bench", ".ci")]
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
    files += [path for path in sorted(ROOT.iterdir()) if path.is_file()]
    text_files = [path for path in files if "__pycache__" not in path.parts and path.name != ".venv.log"]
    violations = shape.machine_paths(text_files, ROOT)
    assert not violations, listed(violations)


def test_every_dependency_is_pinned_exactly_and_from_nowhere_in_particular() -> None:
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    ]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9a-z.]*", line)] == []
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    asked = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["dev"]
    names = {re.split(r"[^A-Za-z0-9_.-]", requirement)[0].lower() for requirement in asked}
    assert names <= pinned
