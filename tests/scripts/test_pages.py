"""Pages for readers: the front page stays short, the index is whole, and what they tell to type exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import commands

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
GUIDES = ("README.md", "docs/getting-started.md", "docs/index.md", "docs/glossary.md", "docs/performance.md")
# Words that are plain English, or the standard of the field, need no row.
MAX_TERMS = 75
COMMAND = re.compile(r"(?:^(?:\w+)?\$ +|`)(convoy (?:[^`\n#]|\\\n)*)", re.MULTILINE)


def commands_of(text: str) -> list[list[str]]:
    """Return the words of every `convoy` command in a page, up to its comment or first operator."""
    found = [re.split(r"[|&;>]", line.replace("\\\n", " "))[0].split() for line in COMMAND.findall(text)]
    return [words[1:] for words in found if len(words) > 1 and words[1].islower()]


def problem_of(words: list[str], page: str) -> str | None:
    """Return the verb or flag of a command that the reference does not have, or None."""
    path = f"convoy {words[0]}"
    if len(words) > 1 and f" {path} {words[1]}\n" in page:
        path += f" {words[1]}"
    heading = re.search(rf"^#+ {re.escape(path)}$", page, re.MULTILINE)
    if heading is None:
        return path
    section = re.split(r"^#+ ", page[heading.end() :], maxsplit=1, flags=re.MULTILINE)[0]
    flags = [word for word in words if word.startswith("--")]
    return next((f"{path} {flag}" for flag in flags if not re.search(rf"{flag}\b", section)), None)


def test_the_front_page_stays_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 900


def test_the_front_page_names_the_command_that_continuous_integration_runs() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    run = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert "timed make test" in [line.strip() for line in run]
    assert "`make test`" in text
    assert "`make demo`" in text


def test_the_index_has_every_page() -> None:
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md") if page.name != "index.md"]
    assert [page for page in pages if f"]({page})" not in text] == []


@pytest.mark.parametrize("page", GUIDES)
def test_every_command_of_a_guide_exists(page: str) -> None:
    reference = commands.PAGE.read_text(encoding="utf-8")
    found = commands_of((ROOT / page).read_text(encoding="utf-8"))
    assert found or page == "docs/index.md"
    assert [problem for words in found if (problem := problem_of(words, reference))] == []


@pytest.mark.parametrize("page", ["docs/performance.md", "bench/METHODOLOGY.md"])
def test_every_bench_of_a_list_is_a_verb_of_convoy_bench(page: str) -> None:
    reference = commands.PAGE.read_text(encoding="utf-8")
    lists = re.findall(r"`convoy bench ([\w-]+)`((?:(?:,| and) `[\w-]+`)*)", (ROOT / page).read_text("utf-8"))
    assert lists
    verbs = {verb for first, others in lists for verb in (first, *re.findall(r"`([\w-]+)`", others))}
    assert {verb for verb in verbs if f" convoy bench {verb}\n" not in reference} == set()


def test_a_command_that_does_not_exist_is_found() -> None:
    reference = commands.PAGE.read_text(encoding="utf-8")
    assert commands_of("alpha$ convoy serve demo --fast\nor `convoy fly`") == [
        ["serve", "demo", "--fast"],
        ["fly"],
    ]
    assert problem_of(["serve", "demo", "--fast"], reference) == "convoy serve --fast"
    assert problem_of(["roster", "sign", "--new-operator", "DIR"], reference) is None
    assert problem_of(["fly"], reference) == "convoy fly"


def test_the_glossary_is_short_and_each_term_is_used() -> None:
    page = (DOCS / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?!term |---)([^|]+) \|", page, re.MULTILINE)
    terms = [term.lower() for row in rows for term in row.split(", ")]
    assert len(terms) <= MAX_TERMS
    others = [*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "ARCHITECTURE.md"]
    text = "\n".join(one.read_text(encoding="utf-8") for one in others if one.name != "glossary.md").lower()
    sources = "\n".join(one.read_text(encoding="utf-8") for one in (ROOT / "src").rglob("*.py"))
    classes = " ".join(re.findall(r"^class (\w+)", sources, re.MULTILINE)).lower()
    unused = [
        term
        for term in terms
        if not re.search(rf"\b{re.escape(term)}", text) and re.sub(r"[ -]", "", term) not in classes
    ]
    assert unused == []
