from __future__ import annotations

from pathlib import Path

import pytest

from same_code import main

KERNEL = '''"""The kernel."""

from convoy.plan.spec import Spec

LIMIT = 3  # rows


class Linear:
    """A linear."""

    def run(self, rows: int) -> int:
        """What it gives."""
        if rows > LIMIT:
            raise ValueError(f"{rows} rows, and {LIMIT} is the limit")
        return rows * Spec.width
'''
SPEC = "class Spec:\n    width = 4\n"
OTHER = "class Spec:\n    width = 5\n"
MOVED = KERNEL.replace("convoy.plan.spec", "convoy.plan.shape.spec")


def write(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / "src" / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return str(root)


@pytest.fixture
def old(tmp_path: Path) -> str:
    files = {"convoy.linear": KERNEL, "convoy.plan.spec": SPEC, "convoy.plan.other": OTHER}
    return write(tmp_path / "old", files)


def new(tmp_path: Path, kernel: str, name: str = "convoy.kernels.linear") -> str:
    files = {name: kernel, "convoy.plan.shape.spec": SPEC, "convoy.plan.other": OTHER}
    return write(tmp_path / "new", files)


def test_a_moved_module_with_other_prose_is_the_same(tmp_path: Path, old: str) -> None:
    told = MOVED.replace("What it gives.", "Return the rows.").replace("  # rows", "")
    assert main([old, new(tmp_path, told)]) == 0


@pytest.mark.parametrize(
    ("was", "now"),
    [("rows > LIMIT", "rows >= LIMIT"), ("LIMIT = 3", "LIMIT = 4"), ("rows * Spec", "rows + Spec")],
)
def test_a_changed_expression_is_found(
    tmp_path: Path, old: str, was: str, now: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([old, new(tmp_path, MOVED.replace(was, now))]) == 1
    assert "convoy/kernels/linear.py: statement" in capsys.readouterr().out


def test_a_renamed_class_needs_its_line_in_the_file(tmp_path: Path, old: str) -> None:
    renames = tmp_path / "renames.txt"
    renames.write_text("# classes\nLinear=PackedLinear\n", encoding="utf-8")
    changed = new(tmp_path, MOVED.replace("Linear", "PackedLinear"))
    assert main([old, changed]) == 1
    assert main([old, changed, "--allow-renames", str(renames)]) == 0


def test_other_words_pass_where_strings_are_allowed_and_are_listed(
    tmp_path: Path, old: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = new(tmp_path, MOVED.replace("rows, and {LIMIT} is the limit", "rows exceed the limit"))
    assert main([old, changed]) == 1
    capsys.readouterr()
    assert main([old, changed, "--allow-strings"]) == 0
    assert "rows exceed the limit" in capsys.readouterr().out


def test_an_import_that_means_another_class_is_found(
    tmp_path: Path, old: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = new(tmp_path, KERNEL.replace("convoy.plan.spec", "convoy.plan.other"))
    assert main([old, changed]) == 1
    assert "imports convoy.plan.other.Spec where it imported convoy.plan.spec.Spec" in capsys.readouterr().out


def test_an_import_through_a_package_means_the_same(tmp_path: Path, old: str) -> None:
    changed = new(tmp_path, KERNEL.replace("convoy.plan.spec", "convoy.plan"))
    write(tmp_path / "new", {"convoy.plan.__init__": "from convoy.plan.shape.spec import Spec\n"})
    assert main([old, changed]) == 0


def test_joined_modules_are_the_same_only_where_joins_are_allowed(tmp_path: Path, old: str) -> None:
    joined = KERNEL.replace("from convoy.plan.spec import Spec\n", SPEC)
    changed = write(tmp_path / "new", {"convoy.linear": joined, "convoy.plan.other": OTHER})
    assert main([old, changed]) == 1
    assert main([old, changed, "--allow-joins"]) == 0


def test_a_module_that_is_gone_or_new_is_named(
    tmp_path: Path, old: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = write(
        tmp_path / "new", {"convoy.linear": KERNEL, "convoy.plan.spec": SPEC, "convoy.x": "X = 1\n"}
    )
    assert main([old, changed]) == 1
    said = capsys.readouterr().out
    assert "other.py: has no module in the new tree" in said
    assert "convoy/x.py: is new" in said
