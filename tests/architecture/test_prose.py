"""What counts as an offence of prose, and the ratchet: no figure of the repository gets worse."""

from __future__ import annotations

from pathlib import Path

import pytest

import house
from architecture import prose
from architecture.prose import Prose, begins_with_verb, measure_markdown, measure_python

ROOT = Path(__file__).resolve().parents[2]


def page(tmp_path: Path, text: str) -> Prose:
    path = tmp_path / "page.md"
    path.write_text(text, encoding="utf-8")
    return measure_markdown(path, "page.md")


def module(tmp_path: Path, text: str) -> Prose:
    path = tmp_path / "module.py"
    path.write_text(text, encoding="utf-8")
    return measure_python(path, "module.py")


def test_no_figure_is_worse_than_its_limit() -> None:
    rows = prose.figures(ROOT)
    assert all(row.holds for row in rows), f"\n{prose.table(rows)}\nsee: python scripts/house.py --files FILE"


def test_no_limit_is_beyond_what_was_there_at_first_or_its_target() -> None:
    for row in prose.figures(ROOT):
        low, high = sorted((row.first, row.target))
        assert low <= row.limit <= high, row.name


@pytest.mark.parametrize(
    "docstring",
    [
        "Return the rows.",
        "Count of nothing",
        "Do not wait.",
        "Re-read the roster.",
        "Hold\n\nall.",
        "Un-pin it",
    ],
)
def test_an_imperative_verb_is_one(docstring: str) -> None:
    assert begins_with_verb(docstring)


@pytest.mark.parametrize(
    "docstring",
    [
        "The rows.",
        "Returns the rows.",
        "What it gives.",
        "``x`` is taken.",
        "[T, n]",
        "Count's value",
        "Raised",
    ],
)
def test_no_other_word_is(docstring: str) -> None:
    assert not begins_with_verb(docstring)


@pytest.mark.parametrize("word", ["who", "Whose", "nobody", "what is", "That which", "of whom"])
def test_a_riddle_word_is_found_in_docstrings_comments_and_pages(tmp_path: Path, word: str) -> None:
    found = module(
        tmp_path, f'"""It is {word} here.\n\nAnd {word} there."""\nx = 1  # {word}\ny = "{word}"\n'
    )
    assert found.riddles == 3
    assert [offence.partition(": ")[0] for offence in found.offences] == [
        *("module.py:1", "module.py:3", "module.py:4"),
    ]
    assert page(tmp_path, f"Text.\n\n| a | {word} |\n").riddles == 1


def test_words_in_code_and_within_other_words_are_no_riddles(tmp_path: Path) -> None:
    assert module(tmp_path, '"""Take `who` and ``what is`` as a whole."""\n').riddles == 0
    assert page(tmp_path, "Take `who`, [the whole](who.md).\n\n```\nwho\n```\n").riddles == 0


def test_riddle_words_over_a_line_end_count_once(tmp_path: Path) -> None:
    assert module(tmp_path, '"""All that\nwhich is\n\nwhat\nis."""\n').riddles == 2


def test_functions_and_classes_count_and_modules_do_not(tmp_path: Path) -> None:
    text = '"""The module."""\nclass A:\n    """The class."""\n    def f(self):\n        """Return it."""\n'
    found = module(tmp_path, text)
    assert (found.docstrings, found.verbs) == (2, 1)
    assert found.offences == ["module.py:3: A: does not begin with a verb: The class."]


def test_python_outside_the_package_has_figures_of_its_own(tmp_path: Path) -> None:
    for name in ("src", "docs", "tests", "bench", "scripts"):
        (tmp_path / name).mkdir()
    (tmp_path / "README.md").write_text("Text.\n", encoding="utf-8")
    (tmp_path / "tests" / "a.py").write_text('def f():\n    """Who."""\n', encoding="utf-8")
    (tmp_path / "bench" / "b.py").write_text("# One two three.\n", encoding="utf-8")
    (tmp_path / "src" / "c.py").write_text("# One two.\n", encoding="utf-8")
    values = prose.values_of(*prose.measure_repository(tmp_path))
    assert (values["riddles_src"], values["riddles_tests"], values["verb_share_tests"]) == (0, 250, 0)


def test_only_a_comment_that_says_something_on_its_own_line_is_one(tmp_path: Path) -> None:
    found = module(tmp_path, "# why\nx = 1  # beside\n# noqa: E501\ny = 2\n")
    assert (found.own_comments, found.lines) == (1, 4)


def test_a_page_has_short_sentences_cells_and_lines(tmp_path: Path) -> None:
    assert page(tmp_path, " ".join(["word"] * 40) + ".\n").long_sentences == 0
    assert page(tmp_path, "\n".join(["word"] * 41) + ".\n").long_sentences == 1
    assert page(tmp_path, "- " + "\n- ".join(["word"] * 41) + ".\n").long_sentences == 0
    assert page(tmp_path, f"| {'x' * 200} |\n").long_cells == 0
    assert page(tmp_path, f"| {'x' * 201} |\n").long_cells == 1
    assert page(tmp_path, "x" * 110 + "\n").long_lines == 0
    assert page(tmp_path, "x" * 111 + "\n").long_lines == 1
    assert page(tmp_path, f"[{'x' * 111}](a.md)\n```\n{'x' * 111}\n```\n").long_lines == 0


def test_limits_are_lowered_to_better_values_and_never_past_a_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "limits.toml"
    row = '[{}]\ntext = "t"\nfirst = 9\nlimit = 9\ntarget = {}\n'
    path.write_text("\n".join(row.format(*one) for one in (("a", 3), ("b", 90), ("c", 3))), encoding="utf-8")
    monkeypatch.setattr(house, "LIMITS_FILE", path)
    house.lower(
        [
            prose.Figure("a", "t", 5, 9, 9, 3, more_is_better=False),
            prose.Figure("b", "t", 95, 9, 9, 90, more_is_better=True),
            prose.Figure("c", "t", 12, 9, 9, 3, more_is_better=False),
        ]
    )
    limits = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("limit")]
    assert limits == ["limit = 5", "limit = 90", "limit = 9"]


def test_the_script_prints_the_table_and_lists_the_offences_of_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert house.main([]) == 0
    assert "docstrings that begin with a verb" in capsys.readouterr().out
    (tmp_path / "a.py").write_text('def f():\n    """Who."""\n', encoding="utf-8")
    assert house.main(["--files", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "a.py:2: riddle word 'Who'" in told
    assert "a.py:2: f: does not begin with a verb: Who." in told
    assert "1 words, 1000.0 riddle words per 1,000, 0 of 1 docstrings begin with a verb" in told
