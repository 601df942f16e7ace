"""A module or a file that a text names, and that is gone, is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from architecture import references
from architecture.source import Module, load_modules

FILES = {"__init__.py": "", "wire/__init__.py": "", "wire/frame.py": "", "engine/__init__.py": ""}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "src" / "convoy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def with_engine(folder: Path, text: str) -> list[Module]:
    (folder / "src/convoy/engine/engine.py").write_text(text, encoding="utf-8")
    return load_modules(folder / "src")


@pytest.mark.parametrize("name", ["wire.codec", "convoy.wire.codec.decode", "engine.loop"])
def test_a_module_that_is_gone_is_found_in_docstrings_and_comments(folder: Path, name: str) -> None:
    found = references.stale_module_names(with_engine(folder, f'"""See `{name}`."""\n# and `{name}()`\n'))
    assert found == [
        f"src/convoy/engine/engine.py:1: no module is named {name}",
        f"src/convoy/engine/engine.py:2: no module is named {name}",
    ]


@pytest.mark.parametrize(
    "name",
    ["wire.frame", "wire.frame.Frame.decode", "convoy.wire", "convoy.serve", "wire.toml", "other.frame"],
)
def test_a_module_that_is_there_and_other_names_pass(folder: Path, name: str) -> None:
    assert references.stale_module_names(with_engine(folder, f'"""See `{name}`."""')) == []


def test_a_package_names_modules_and_identifiers_of_its_own(folder: Path) -> None:
    text = '"""`engine`, `submit` and `Engine`; `frame` is of wire, and `loop` is gone."""'
    (folder / "src/convoy/engine/__init__.py").write_text(text, encoding="utf-8")
    found = references.stale_package_members(with_engine(folder, "def submit(frame): pass"))
    assert found == [
        "src/convoy/engine/__init__.py:1: frame is not here",
        "src/convoy/engine/__init__.py:1: loop is not here",
    ]


@pytest.mark.parametrize(("num_importers", "said"), [(10, []), (10, ["frame"]), (9, [])])
def test_a_package_names_its_sub_packages_and_the_modules_that_many_others_import(
    folder: Path, num_importers: int, said: list[str]
) -> None:
    package = folder / "src/convoy/wire"
    (package / "inner").mkdir()
    (package / "inner/__init__.py").write_text("", encoding="utf-8")
    (package / "__init__.py").write_text(f'"""Open {[f"`{one}`" for one in said]}."""', encoding="utf-8")
    for number in range(num_importers):
        path = folder / f"src/convoy/engine/user{number}.py"
        path.write_text("import convoy.wire.frame\n", encoding="utf-8")
    # A neighbour in the package is no importer from elsewhere.
    (package / "codec.py").write_text("import convoy.wire.frame\n", encoding="utf-8")
    unnamed = ["frame"] if num_importers == 10 and not said else []
    assert references.unnamed_package_members(load_modules(folder / "src")) == [
        *(
            f"src/convoy/wire/{one}.py:1: the docstring of convoy.wire does not name `{one}`"
            for one in unnamed
        ),
        "src/convoy/wire/inner/__init__.py:1: the docstring of convoy.wire does not name `inner`",
    ]


def test_a_path_that_is_gone_is_found(folder: Path) -> None:
    text = '"""See wire/frame.py, `src/convoy/wire/frame.py`, torch/x/y.py and wire/codec.py."""'
    found = references.stale_paths_of_modules(with_engine(folder, text), folder)
    assert found == ["src/convoy/engine/engine.py:1: there is no wire/codec.py"]


def test_a_document_names_modules_and_paths_that_are_there(folder: Path) -> None:
    page = folder / "page.md"
    page.write_text("`wire.limit`, `wire.codec.decode`, wire/codec.py, wire/frame.py", encoding="utf-8")
    modules = load_modules(folder / "src")
    assert references.stale_long_names(page, modules) == ["page.md: no module is named wire.codec.decode"]
    assert references.stale_paths_of_page(page, folder) == ["page.md: there is no wire/codec.py"]
