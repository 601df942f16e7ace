"""Each rule about interfaces finds a planted violation and lets the lawful neighbour pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from architecture import interfaces
from architecture.source import Module, load_modules

STAGE = """
class Stage(Protocol):
    def run(self): ...
    def select(self): ...
    def make_pools(self): ...
    @property
    def hidden_size(self): ...
"""
HOST = """
class HostStage:
    hidden_size = 1
    def run(self): ...
    def select(self): ...
    def make_pools(self): ...
"""


def tree(tmp_path: Path, files: dict[str, str]) -> list[Module]:
    for name, text in files.items():
        path = tmp_path / "src" / "convoy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return load_modules(tmp_path / "src")


@pytest.mark.parametrize("cast", ["cast(Link, x)", "typing.cast('Link', x)", "cast('Sequence[Link]', x)"])
def test_a_cast_to_a_class_of_the_package_is_found(tmp_path: Path, cast: str) -> None:
    found = interfaces.casts_to_own_classes(tree(tmp_path, {"wire/a.py": f"class Link: ...\ny = {cast}"}))
    assert found == ["src/convoy/wire/a.py:2: cast to Link"]


@pytest.mark.parametrize("cast", ["cast('Any', x)", "view.cast('B')", "cast(int, Link())"])
def test_a_cast_to_a_foreign_type_passes(tmp_path: Path, cast: str) -> None:
    assert interfaces.casts_to_own_classes(tree(tmp_path, {"a.py": f"class Link: ...\ny = {cast}"})) == []


@pytest.mark.parametrize(
    "check",
    [
        "isinstance(x, HostStage)",
        "isinstance(x, int | stage.HostStage)",
        "isinstance(x, (int, HostStage))",
        "issubclass(x, HostStage)",
        "type(x) is HostStage",
    ],
)
def test_a_check_for_a_concrete_stage_outside_its_package_is_found(tmp_path: Path, check: str) -> None:
    files = {"model/host/stage.py": HOST, "cluster/head.py": f"y = {check}"}
    assert interfaces.concrete_checks(tree(tmp_path, files)) == [
        "src/convoy/cluster/head.py:1: a check for HostStage, which is convoy.model.host's own"
    ]


def test_a_case_for_a_concrete_stage_outside_its_package_is_found(tmp_path: Path) -> None:
    files = {"model/host/stage.py": HOST, "cluster/head.py": "match x:\n  case HostStage():\n    pass"}
    assert len(interfaces.concrete_checks(tree(tmp_path, files))) == 1


@pytest.mark.parametrize("place", ["model/host/load.py", "model/host/kv/pool.py"])
def test_a_check_for_a_concrete_stage_in_its_package_passes(tmp_path: Path, place: str) -> None:
    files = {"model/host/stage.py": HOST, place: "y = isinstance(x, HostStage)"}
    assert interfaces.concrete_checks(tree(tmp_path, files)) == []


def test_a_check_for_a_class_that_is_no_stage_passes(tmp_path: Path) -> None:
    files = {"wire/a.py": "class StageLost: ...", "cluster/head.py": "y = isinstance(x, StageLost)"}
    assert interfaces.concrete_checks(tree(tmp_path, files)) == []


@pytest.mark.parametrize(
    "own",
    [
        "    hidden_size = 1",
        "    def __init__(self):\n        self.hidden_size = 1",
        "    def __init__(self):\n        self.hidden_size: int = 1",
        "    @property\n    def hidden_size(self): ...",
    ],
)
def test_a_stage_with_every_member_passes_however_it_has_them(tmp_path: Path, own: str) -> None:
    files = {"model/stage.py": STAGE, "model/host.py": HOST.replace("    hidden_size = 1", own)}
    assert interfaces.incomplete_classes(tree(tmp_path, files)) == []


def test_a_stage_that_lacks_a_member_is_found(tmp_path: Path) -> None:
    files = {"model/stage.py": STAGE, "model/host.py": HOST.replace("    hidden_size = 1\n", "")}
    assert interfaces.incomplete_classes(tree(tmp_path, files)) == [
        "src/convoy/model/host.py:2: HostStage has no hidden_size, as Stage has"
    ]


def test_members_of_a_base_count_and_those_of_a_protocol_do_not(tmp_path: Path) -> None:
    whole = {"model/stage.py": STAGE, "model/host.py": HOST, "model/b.py": "class B(HostStage): ..."}
    assert interfaces.incomplete_classes(tree(tmp_path, whole)) == []
    part = HOST.replace("    hidden_size = 1\n", "").replace("HostStage", "HostStage(Stage)")
    assert len(interfaces.incomplete_classes(tree(tmp_path, {"model/host.py": part}))) == 2
