"""Each rule about rows finds a planted violation and lets the lawful neighbour pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from architecture import rows
from architecture.source import Module, load_modules

HOME = "convoy.plan.families"


def modules_of(tmp_path: Path, **texts: str) -> list[Module]:
    for name, text in texts.items():
        path = tmp_path / "src" / "convoy" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return load_modules(tmp_path / "src")


def test_a_word_outside_its_home_is_found(tmp_path: Path) -> None:
    modules = modules_of(tmp_path, plan__families__llama='ROW = "llama"\n', model__load='x == "llama"\n')
    assert rows.scattered_words(modules, {"llama"}, HOME) == [
        "src/convoy/model/load.py:1: 'llama' stands in convoy.plan.families alone: read its row"
    ]
    assert rows.scattered_words(modules, {"llama"}, "convoy.model.load") == [
        "src/convoy/plan/families/llama.py:1: 'llama' stands in convoy.model.load alone: read its row"
    ]
    assert rows.scattered_words(modules, {"qwen3"}, HOME) == []


def test_a_word_in_two_modules_of_its_home_or_in_none_is_found(tmp_path: Path) -> None:
    modules = modules_of(
        tmp_path, plan__families__a='x = "llama", "phi3"\n', plan__families__b='y = "phi3"\n'
    )
    assert rows.shared_words(modules, ["llama"], HOME) == []
    assert rows.shared_words(modules, ["phi3", "glm"], HOME) == [
        "phi3: ['convoy.plan.families.a', 'convoy.plan.families.b'], expected one",
        "glm: [], expected one",
    ]


@pytest.mark.parametrize(
    "text",
    [
        'type(x).__name__ == "Llama"',
        "type(x).__name__ in NAMES",
        "TABLE[type(x).__name__]",
        "TABLE.get(type(x).__name__)",
        "f.__qualname__.startswith(type(x).__name__)",
        'x.__class__.__name__.endswith("Norm")',
    ],
)
def test_a_class_chosen_by_its_name_is_found(tmp_path: Path, text: str) -> None:
    found = rows.classes_by_name(modules_of(tmp_path, model__load=f"{text}\n"))
    assert found == ["src/convoy/model/load.py:1: a class is chosen by the text of its name"]


@pytest.mark.parametrize("text", ['f"a {type(x).__name__}"', "type(x) is Llama", "log(type(x).__name__, 1)"])
def test_a_name_that_is_shown_and_a_type_that_is_compared_pass(tmp_path: Path, text: str) -> None:
    assert rows.classes_by_name(modules_of(tmp_path, model__load=f"{text}\n")) == []
