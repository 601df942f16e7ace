"""What is compiled before the workers begin is what pytest reads in each of them."""

from __future__ import annotations

from pathlib import Path
from types import CodeType

import pytest
from _pytest.assertion.rewrite import _read_pyc

from support.compile_ahead import compiled_file, is_current, write_rewritten


def test_pytest_reads_what_was_rewritten_ahead_until_the_file_changes(tmp_path: Path) -> None:
    file = tmp_path / "test_one.py"
    file.write_text("def test_one():\n    left = 1\n    assert left == 2\n")
    assert not is_current(file)
    write_rewritten(file)
    assert is_current(file)
    code = _read_pyc(file, compiled_file(file))
    assert isinstance(code, CodeType)
    names: dict[str, object] = {}
    exec(code, names)  # noqa: S102
    with pytest.raises(AssertionError, match="assert 1 == 2"):
        names["test_one"]()  # type: ignore[operator]
    file.write_text(file.read_text().replace("2", "3"))
    assert not is_current(file)
    assert _read_pyc(file, compiled_file(file)) is None
