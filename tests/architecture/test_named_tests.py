"""Pages that name tests: each name is a test that exists, each mistake has one or says why it needs none."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAME = re.compile(r"`(test_\w+)`")
FILE = re.compile(r"`((?:tests|docs|src)/[\w./-]+?)`")
PAGES = ("docs/defects.md", "docs/threat-model.md", "SECURITY.md", "docs/attestation.md", "docs/api.md")


@functools.cache
def names_of_all_tests() -> frozenset[str]:
    """Return the names of all test functions, wherever they are and whatever their file is called."""
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        tree = ast.parse(path.read_bytes())
        functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
        found |= {function.name for function in functions if function.name.startswith("test_")}
    return frozenset(found)


def rows_of(text: str) -> list[list[str]]:
    """Return the cells of every row of the tables in a page, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in rows if row[0] not in {"mistake", "asset"} and set(row[0]) != {"-"}]


@pytest.mark.parametrize("page", PAGES)
def test_every_test_and_file_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert sorted(set(NAME.findall(text)) - names_of_all_tests()) == []
    assert [file for file in sorted(set(FILE.findall(text))) if not (ROOT / file).exists()] == []


def test_every_mistake_has_a_test_or_a_reason_why_it_needs_none() -> None:
    rows = rows_of((ROOT / "docs/defects.md").read_text(encoding="utf-8"))
    assert len(rows) > 40
    for mistake, here, shown in rows:
        assert NAME.search(shown) or "Cannot occur because" in here, mistake


def test_every_behaviour_shared_with_another_server_has_a_test() -> None:
    rows = rows_of((ROOT / "docs/api.md").read_text(encoding="utf-8"))
    compared = [row for row in rows if len(row) == 4 and row[2] in {"same", "different", "not served"}]
    assert len(compared) > 30
    for behaviour, _, here, shown in compared:
        assert bool(NAME.search(shown)) == (here == "same"), behaviour


def test_every_adversary_has_its_row_of_what_remains() -> None:
    text = (ROOT / "docs/threat-model.md").read_text(encoding="utf-8")
    rows = [row for row in rows_of(text) if len(row) == 5]
    assert len(rows) > 20
    for asset, adversary, protected, shown, remains in rows:
        assert asset
        assert protected
        assert remains
        assert NAME.search(shown) or shown == "nothing", adversary


def test_a_name_that_no_test_has_is_found() -> None:
    assert NAME.findall("see `test_that_is_not_there` and `tests/x.py`") == ["test_that_is_not_there"]
    assert "test_that_is_not_there" not in names_of_all_tests()
    assert FILE.findall("see `tests/architecture` and `test_a`") == ["tests/architecture"]
