"""The table of settings: a default stands there alone, and docs, flags and files are made from it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import convoy
from convoy.cli.flags.table import option
from convoy.config.table import DEVICE_CHUNK, HOST_CHUNK, TABLES, SettingRow, rows

SOURCE = Path(convoy.__file__).parent
# A bench chooses its own load, and writes it down with its figures.
SOURCES = [path for path in sorted(SOURCE.rglob("*.py")) if not {"bench", "benches"} & set(path.parts)]
ROWS = [row for table in TABLES for row in rows(table)]
# Names that the same setting has elsewhere.
OTHER_NAMES = {"max_model_len": ("max_context",), "wait_s": ("start_wait_s",)}
# Any number of other things is 0, and an address or a word is a default of other programs too.
TELLING = [row for row in ROWS if isinstance(row.default, int | float) and row.default not in (0, 1)]


def defaults(path: Path) -> Iterator[tuple[str, Any, int]]:
    """Yield name, number or text, and line of each literal default of a field, parameter or keyword."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            pairs = [(node.target.id, node.value)]
        elif isinstance(node, ast.keyword):
            pairs = [(node.arg or "", node.value)]
        elif isinstance(node, ast.arguments):
            late = node.args[len(node.args) - len(node.defaults) :]
            pairs = [(one.arg, value) for one, value in zip(late, node.defaults, strict=True)]
            pairs += [(one.arg, value) for one, value in zip(node.kwonlyargs, node.kw_defaults, strict=True)]
        else:
            continue
        for name, value in pairs:
            if isinstance(value, ast.Constant):
                yield name, value.value, value.lineno


@functools.cache
def all_defaults() -> list[tuple[str, str, Any, int]]:
    """Return file, name, value and line of each default of the source, which is read once."""
    return [(path.relative_to(SOURCE).as_posix(), *default) for path in SOURCES for default in defaults(path)]


def places(row: SettingRow) -> list[str]:
    names = (row.key, *OTHER_NAMES.get(row.key, ()))
    return [
        f"{path}:{line}"
        for path, name, value, line in all_defaults()
        if name in names and type(value) is type(row.default) and value == row.default
    ]


@pytest.mark.parametrize("row", TELLING, ids=lambda row: f"{row.table}.{row.key}")
def test_a_default_is_written_once(row: SettingRow) -> None:
    assert [place.partition(":")[0] for place in places(row)] == ["config/table.py"]


def test_the_search_for_defaults_finds_a_second_one(tmp_path: Path) -> None:
    file = tmp_path / "options.py"
    file.write_text(
        "class A:\n    max_batch: int = 32\n\ndef f(drain_s=30.0, *, port=8765): ...\nf(kernel='auto')\n"
    )
    assert list(defaults(file)) == [
        ("max_batch", 32, 2),
        ("drain_s", 30.0, 4),
        ("port", 8765, 4),
        ("kernel", "auto", 5),
    ]


def test_no_other_module_writes_the_sizes_of_a_chunk() -> None:
    assert (HOST_CHUNK, DEVICE_CHUNK) == (256, 2048)
    found = [
        path
        for path, name, value, _ in all_defaults()
        if name in {"prefill_chunk", "chunk"} and value in {HOST_CHUNK, DEVICE_CHUNK}
    ]
    assert found == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.table}.{row.key}")
def test_a_row_explains_its_key_in_one_plain_line(row: SettingRow) -> None:
    assert row.setting.text
    assert "\n" not in row.setting.text
    assert "](" not in row.setting.text


def test_a_flag_shows_the_default_of_its_row() -> None:
    assert ": 32; up to 256 where all stages are on CUDA]" in option("engine", "max_batch").help
    assert option("serve", "port").help.endswith("  [default: 8765]")
    assert option("engine", "max_model_len").help.endswith("  [default: the model's own]")
    assert "default" not in option("serve", "api_key_file").help
