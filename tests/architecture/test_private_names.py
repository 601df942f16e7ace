"""Tests touch the package through its public names, except for a few files, each with a reason."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from architecture.private_names import ALLOWED, MAX_FILES, own_names, touches, touching_files

ROOT = Path(__file__).resolve().parents[2]
OURS = frozenset({"_limit", "_Key"})


def touched(text: str) -> list[tuple[int, str]]:
    return list(touches(ast.parse(text), OURS))


def test_few_files_touch_private_names_of_ours_and_each_is_in_the_list_with_a_reason() -> None:
    found = touching_files(ROOT)
    sites = [f"{file}:{line}: {text}" for file, lines in found.items() for line, text in lines]
    print(f"private names of ours: {len(found)} test files, {len(sites)} places; at most {MAX_FILES} files")
    assert not [site for site in sites if site.partition(":")[0] not in ALLOWED]
    assert not ALLOWED.keys() - found.keys(), "a file in the list needs no leave any more"
    assert len(found) <= MAX_FILES


@pytest.mark.parametrize(
    "text",
    [
        "x = thing._limit",
        "thing._limit = 3",
        "a.b[0]._limit.c",
        "make()._limit",
        "super()._limit",
        "from convoy.wire.frame import _limit",
        "from convoy.wire.frame import f, _other",
        "monkeypatch.setattr(thing, '_limit', 3)",
        "monkeypatch.setattr('convoy.wire.frame._limit', 3)",
        "getattr(thing, '_limit')",
        "vars(thing)['_limit'] = 3",
    ],
)
def test_a_touch_is_found(text: str) -> None:
    assert len(touched(f"\n{text}\n")) == 1
    assert touched(f"\n{text}\n")[0][0] == 2


@pytest.mark.parametrize(
    "text",
    [
        "x = thing.limit",
        "x = thing._other",
        "x = thing.__len__()",
        "import os\nos._limit",
        "torch.ops.mkldnn._limit(x)",
        "from support.members import _limit",
        "monkeypatch.setattr(thing, 'limit', 3)",
        "class Fake:\n    def f(self):\n        return self._limit",
        "class Fake:\n    def __init__(self):\n        self._limit = 1\nFake()._limit",
        "def _limit(): ...\nmodule._limit",
    ],
)
def test_what_is_public_or_the_tests_own_is_no_touch(text: str) -> None:
    assert touched(text) == []


def test_the_names_are_those_that_the_package_defines(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        "_LIMIT = 1\nclass _Key:\n    _field: int\n    def _make(self):\n        self._made = __name__\n"
        "        other._not_ours = _ = 1\n",
        encoding="utf-8",
    )
    assert own_names(tmp_path) == {"_LIMIT", "_Key", "_field", "_make", "_made"}
