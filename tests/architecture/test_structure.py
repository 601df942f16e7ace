"""The figures of structure count what they say, on trees that are made for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from architecture.source import Module, load_modules
from architecture.structure import defining, hint_share, loop_modules, measure_structure, peer_step_modules

FILES = {
    "__init__.py": "",
    "errors.py": "x = 1",
    "engine/__init__.py": "",
    "engine/engine.py": """
from convoy.engine.scheduler import a
from convoy.engine.kv.pool import b
class Engine: pass
""",
    "engine/scheduler.py": "from convoy.errors import x",
    "engine/unused.py": "",
    "engine/kv/__init__.py": "",
    "engine/kv/pool.py": "from convoy.engine.table import c",
    "engine/table.py": "def late():\n    from convoy.engine.deep import d",
    "engine/deep.py": "",
    "engine/worker.py": """
from convoy.errors import x
from convoy.wire.frame import y
class StageWorker: pass
""",
    "wire/__init__.py": "",
    "wire/frame.py": "import convoy.wire.text",
    "wire/text.py": "",
}


@pytest.fixture
def modules(tmp_path: Path) -> list[Module]:
    for name, text in FILES.items():
        path = tmp_path / "src" / "convoy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (tmp_path / "README.md").write_text("one two\n\nthree\n", encoding="utf-8")
    return load_modules(tmp_path / "src")


def test_the_loop_has_the_modules_beside_it_that_its_imports_reach(modules: list[Module]) -> None:
    assert [name.removeprefix("convoy.engine.") for name in loop_modules(modules)] == [
        *("deep", "engine", "scheduler", "table"),
    ]


def test_a_peers_step_has_its_own_module_and_its_imports_but_the_errors(modules: list[Module]) -> None:
    assert peer_step_modules(modules) == ["convoy.engine.worker", "convoy.wire.frame"]


def test_a_class_that_two_modules_define_has_no_single_place(tmp_path: Path, modules: list[Module]) -> None:
    assert defining(modules, "Engine") == "convoy.engine.engine"
    (tmp_path / "src/convoy/wire/text.py").write_text("class Engine: pass", encoding="utf-8")
    with pytest.raises(ValueError, match="too many values"):
        defining(load_modules(tmp_path / "src"), "Engine")


def test_packages_are_no_modules_and_the_readme_is_counted(tmp_path: Path, modules: list[Module]) -> None:
    found = measure_structure(tmp_path)
    num_files = sum(not module.is_package for module in modules)
    num_lines = sum(len(module.lines) for module in modules if not module.is_package)
    assert found["modules_per_10k_lines"] == round(10_000 * num_files / num_lines, 1)
    assert (found["readme_words"], found["readme_lines"]) == (3, 3)
    assert (found["crowded_packages"], found["repeated_class_names"]) == (0, 0)


def test_of_the_errors_that_are_raised_those_of_ours_are_counted_and_those_with_a_hint(
    tmp_path: Path, modules: list[Module]
) -> None:
    assert hint_share(modules) == 0
    (tmp_path / "src/convoy/errors.py").write_text("class Own(Exception): pass", encoding="utf-8")
    raised = ("Own('a')", "Own('b', hint='c')", "Own('b', public='c')", "ValueError('d')", "Own", "")
    text = "".join(f"def f{number}():\n    raise {one}\n" for number, one in enumerate(raised))
    (tmp_path / "src/convoy/wire/text.py").write_text(text, encoding="utf-8")
    assert hint_share(load_modules(tmp_path / "src")) == 33.33
