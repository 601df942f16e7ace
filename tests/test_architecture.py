"""The rules of the house, held against this repository; tests/architecture/ proves what each one catches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from architecture import imports, interfaces, references, rows, shape
from architecture.source import Module, import_graph, load_modules, load_scripts
from convoy.config.kernels import KERNELS, QUANTIZED
from convoy.plan.spec.registry import FAMILIES

Rule = Callable[[list[Module]], list[str]]
ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src"


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    found = load_modules(SRC)
    assert len(found) > 10, f"found only {len(found)} modules under {SRC}"
    return found


@pytest.fixture(scope="module")
def graph(modules: list[Module]) -> dict[str, dict[str, int]]:
    """Return what each module imports."""
    return import_graph(modules)


@pytest.fixture(scope="module")
def scripts() -> list[Module]:
    return [script for name in ("training", "scripts", "bench") for script in load_scripts(ROOT / name)]


def listed(violations: list[str]) -> str:
    return "\n" + "\n".join(violations)


@pytest.mark.parametrize(
    "rule",
    [
        imports.wrong_direction,
        imports.doubles_in_production,
        imports.neighbours,
        imports.import_cycles,
        imports.package_cycles,
        imports.reserved_imports,
        imports.reserved_codecs,
        imports.impure_modules,
        interfaces.casts_to_own_classes,
        interfaces.concrete_checks,
        interfaces.incomplete_classes,
        shape.crowded_packages,
        shape.silent_packages,
        shape.stale_package_names,
        references.stale_module_names,
        references.stale_package_members,
        references.unnamed_package_members,
        shape.repeated_class_names,
        shape.asking_methods,
        shape.stray_frame_types,
        shape.prints,
        shape.environment_reads,
        shape.unresolved_types,
        rows.classes_by_name,
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


def test_nothing_outside_the_bench_imports_the_plain_stream(
    graph: dict[str, dict[str, int]],
) -> None:
    importers = {name for name, edges in graph.items() if "convoy.bench.hop.plain" in edges}
    assert importers == {"convoy.bench.hop.connection"}


def test_only_its_own_verbs_import_the_bench(graph: dict[str, dict[str, int]]) -> None:
    importers = {
        name
        for name, edges in graph.items()
        if not name.startswith("convoy.bench") and any(target.startswith("convoy.bench") for target in edges)
    }
    # This scene is started by bench verbs alone, and its links go through a relay of the bench.
    scenes = {"convoy.cli.local.served_cluster"}
    assert importers > scenes
    assert all(name.startswith("convoy.cli.bench") for name in importers - scenes)


def test_a_small_module_of_one_importer_says_why_it_is_apart(modules: list[Module]) -> None:
    found = shape.unexplained_small_modules(modules)
    assert not found, listed([text for _, text in found])


def test_every_pure_module_that_a_rule_names_exists(modules: list[Module]) -> None:
    names = {module.name for module in modules}
    assert {rule.prefix for rule in imports.PURE} <= names


def test_no_text_names_a_path_of_some_machine() -> None:
    folders = [ROOT / name for name in ("src", "tests", "training", "scripts", "docs", "bench", ".ci")]
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
    # In a git worktree .git is a file that names the main checkout.
    files += [path for path in sorted(ROOT.iterdir()) if path.is_file() and path.name != ".git"]
    text_files = [path for path in files if "__pycache__" not in path.parts and path.name != ".venv.log"]
    violations = shape.machine_paths(text_files, ROOT)
    assert not violations, listed(violations)


def test_every_module_and_file_that_a_text_names_exists(modules: list[Module]) -> None:
    pages = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    violations = references.stale_paths_of_modules(modules, ROOT)
    for page in [*pages, ROOT / "bench/METHODOLOGY.md"]:
        violations += references.stale_long_names(page, modules) + references.stale_paths_of_page(page, ROOT)
    assert not violations, listed(violations)


def test_the_name_of_a_family_stands_in_one_module_of_its_own(modules: list[Module]) -> None:
    home = "convoy.plan.spec.families"
    violations = rows.scattered_words(modules, FAMILIES, home) + rows.shared_words(modules, FAMILIES, home)
    assert not violations, listed(violations)


def test_the_names_of_kernels_stand_in_their_rows_alone(modules: list[Module]) -> None:
    names = {*KERNELS, *QUANTIZED}
    violations = rows.scattered_words(modules, names, "convoy.config.kernels")
    assert not violations, listed(violations)
