"""Measure the prose of the repository: docstrings and comments of Python, docs and the front pages.

Each figure has a target and a limit in prose_limits.toml, and may not be worse than its limit.
`scripts/house.py` prints them as a table, and lists the offences in single files.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from architecture.private_names import touching_files
from architecture.structure import measure_structure

RIDDLE = re.compile(r"\b(who|whom|whose|whoever|nobody|what\s+(?:was|is|has)|that\s+which)\b", re.I)
MAX_SENTENCE_WORDS = 40
MAX_CELL_CHARACTERS = 200
MAX_COLUMNS = 110
VERBS_FILE = Path(__file__).with_name("verbs.txt")
LIMITS_FILE = Path(__file__).with_name("prose_limits.toml")
# Python outside the package; it has rows of its own.
OTHER_FOLDERS = ("tests", "bench", "scripts", "training")
_DIRECTIVE = re.compile(r"#\s*(noqa|type:|ruff:|mypy:|fmt:|pragma|!)")
# A string comes first, so that no # in one counts. A backslash hides a quote in raw strings too.
_STRING_OR_COMMENT = re.compile(
    r'''(?s:"""(?:\\.|[^\\])*?"""|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')'''
    r"|(?P<comment>#[^\n]*)"
)
_CODE = re.compile(r"``[^`]*``|`[^`]*`")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_NEW_PARAGRAPH = re.compile(r"\s*(#|[-*] |\d+\. |>)")


@dataclass
class Prose:
    """Hold counts over some files, and each offence as ``file:line: reason``."""

    words: int = 0
    riddles: int = 0
    docstrings: int = 0  # of functions and classes
    verbs: int = 0  # of these docstrings, how many begin with an imperative verb
    lines: int = 0
    own_comments: int = 0  # lines that hold a comment and nothing else
    long_sentences: int = 0
    long_cells: int = 0
    long_lines: int = 0
    offences: list[str] = field(default_factory=list)

    def add(self, other: Prose) -> None:
        """Add the counts of ``other``."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True)
class Figure:
    """Describe one row of the table: a value, the limit that it may not pass, and the target for both."""

    name: str
    text: str
    value: float
    first: float  # at the commit that the file of limits names
    limit: float
    target: float
    more_is_better: bool

    @property
    def holds(self) -> bool:
        """Return whether the value is within its limit."""
        return self.value >= self.limit if self.more_is_better else self.value <= self.limit

    @property
    def is_reached(self) -> bool:
        """Return whether the value is at its target."""
        return self.value >= self.target if self.more_is_better else self.value <= self.target


@cache
def verbs() -> frozenset[str]:
    """Return the words that a docstring may begin with, in the imperative and in lower case."""
    lines = VERBS_FILE.read_text(encoding="utf-8").splitlines()
    return frozenset(word for line in lines if not line.startswith("#") for word in line.split())


def begins_with_verb(docstring: str) -> bool:
    """Return whether the first word is an imperative verb; re- and un- may stand before one."""
    match = re.match(r"[A-Za-z]+(-[a-z]+)?", docstring.strip())
    if match is None or docstring.strip()[match.end() : match.end() + 1] in {"'", "`", "("}:
        return False
    word = match.group().lower()
    return word in verbs() or word.removeprefix("re-") in verbs() or word.removeprefix("un-") in verbs()


def measure_python(path: Path, place: str) -> Prose:
    """Measure the docstrings and comments of one module. ``place`` names it in offences."""
    text = path.read_text(encoding="utf-8")
    found = Prose(lines=len(text.splitlines()))
    for node, docstring, line in _docstrings(ast.parse(text)):
        _count_words(found, docstring, place, line)
        if isinstance(node, ast.Module):
            continue
        found.docstrings += 1
        if begins_with_verb(docstring):
            found.verbs += 1
        else:
            first = docstring.split("\n")[0][:60]
            found.offences.append(f"{place}:{line}: {node.name}: does not begin with a verb: {first}")
    for comment, line, is_alone in _comments(text):
        _count_words(found, comment.lstrip("# "), place, line)
        found.own_comments += is_alone
    return found


def _docstrings(
    tree: ast.Module,
) -> Iterator[tuple[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield node, docstring, node.body[0].lineno


def _comments(text: str) -> Iterator[tuple[str, int, bool]]:
    """Yield each comment, its line, and whether nothing else is on that line. Directives are left out.

    A pattern finds them in a tenth of the time that the tokenizer of the standard library takes.
    """
    line, counted = 1, 0
    for match in _STRING_OR_COMMENT.finditer(text):
        comment = match.group("comment")
        if comment and not _DIRECTIVE.match(comment):
            line += text.count("\n", counted, match.start())
            counted = match.start()
            yield comment, line, not text[text.rfind("\n", 0, counted) + 1 : counted].strip()


def _count_words(found: Prose, text: str, place: str, line: int) -> None:
    said = _CODE.sub(lambda match: "CODE" + "\n" * match.group().count("\n"), text)
    said = re.sub(r"\]\([^)]*\)", "]", said)
    found.words += len(said.split())
    for match in RIDDLE.finditer(said):
        at = line + said.count("\n", 0, match.start())
        found.riddles += 1
        found.offences.append(f"{place}:{at}: riddle word {' '.join(match.group().split())!r}")


def measure_markdown(path: Path, place: str) -> Prose:
    """Measure one page: riddle words, long sentences, long table cells, and lines that are too wide."""
    found = Prose()
    for paragraph in _paragraphs(path.read_text(encoding="utf-8"), found, place):
        if not paragraph:
            continue
        line = paragraph[0][0]
        said = re.sub(
            r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "CODE", " ".join(text for _, text in paragraph))
        )
        found.words += len(said.split())
        for match in RIDDLE.finditer(said):
            found.riddles += 1
            found.offences.append(f"{place}:{line}: riddle word {match.group()!r}")
        for sentence in _SENTENCE_END.split(said):
            num_words = len(sentence.split())
            if num_words > MAX_SENTENCE_WORDS:
                found.long_sentences += 1
                found.offences.append(f"{place}:{line}: sentence of {num_words} words: {sentence[:60]}")
    return found


def _paragraphs(text: str, found: Prose, place: str) -> list[list[tuple[int, str]]]:
    """Split a page into paragraphs and table cells of (line, text), and count the long ones on the way."""
    in_code = False
    paragraphs: list[list[tuple[int, str]]] = [[]]
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
            paragraphs.append([])
        elif in_code:
            continue
        elif line.lstrip().startswith("|"):
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            for cell in cells:
                if len(cell) > MAX_CELL_CHARACTERS:
                    found.long_cells += 1
                    found.offences.append(f"{place}:{number}: table cell of {len(cell)} characters")
            paragraphs += [[(number, cell)] for cell in cells]
            paragraphs.append([])
        else:
            if len(line) > MAX_COLUMNS and "](" not in line and "http" not in line:
                found.long_lines += 1
                found.offences.append(
                    f"{place}:{number}: {len(line)} columns, and {MAX_COLUMNS} is the limit"
                )
            if not line.strip() or _NEW_PARAGRAPH.match(line):
                paragraphs.append([])
            paragraphs[-1].append((number, line))
    return paragraphs


def measure_file(path: Path, place: str) -> Prose:
    """Measure a module or a page by its suffix."""
    return measure_python(path, place) if path.suffix == ".py" else measure_markdown(path, place)


def measure_all(files: Iterable[Path], root: Path) -> Prose:
    """Return the sum over ``files``, which lie under ``root``."""
    total = Prose()
    for path in files:
        total.add(measure_file(path, path.relative_to(root).as_posix()))
    return total


def measure_repository(root: Path) -> tuple[Prose, Prose, Prose]:
    """Return the prose of src, that of the other Python folders, and that of docs and the front pages."""
    pages = [*sorted((root / "docs").rglob("*.md")), *sorted(root.glob("*.md"))]
    others = [path for name in OTHER_FOLDERS for path in sorted((root / name).rglob("*.py"))]
    code = sorted((root / "src").rglob("*.py"))
    return measure_all(code, root), measure_all(others, root), measure_all(pages, root)


def values_of(code: Prose, others: Prose, pages: Prose) -> dict[str, float]:
    """Return each figure by the name that prose_limits.toml has for it, rounded as shown."""
    return {
        "riddles_src": round(1000 * code.riddles / max(1, code.words), 2),
        "riddles_tests": round(1000 * others.riddles / max(1, others.words), 2),
        "riddles_docs": round(1000 * pages.riddles / max(1, pages.words), 2),
        "verb_share": round(100 * code.verbs / max(1, code.docstrings), 2),
        "verb_share_tests": round(100 * others.verbs / max(1, others.docstrings), 2),
        "own_comment_share": round(100 * code.own_comments / max(1, code.lines), 2),
        "long_sentences": pages.long_sentences,
        "long_cells": pages.long_cells,
        "long_lines": pages.long_lines,
    }


@cache
def figures(root: Path) -> list[Figure]:
    """Return the table of all figures of the repository at ``root``."""
    rows = tomllib.loads(LIMITS_FILE.read_text(encoding="utf-8"))
    own = {"private_files": len(touching_files(root))}
    values = values_of(*measure_repository(root)) | measure_structure(root) | own
    return [
        Figure(
            name=name,
            text=row["text"],
            value=values[name],
            first=row["first"],
            limit=row["limit"],
            target=row["target"],
            more_is_better=row["target"] > row["first"],
        )
        for name, row in rows.items()
    ]


def table(rows: Iterable[Figure]) -> str:
    """Return the figures as lines of text: old and new value, limit, target and whether it is reached."""
    lines = [f"{'':52}{'old':>9}{'new':>9}{'limit':>9}{'target':>9}"]
    for row in rows:
        state = "reached" if row.is_reached else "" if row.holds else "WORSE THAN ITS LIMIT"
        numbers = "".join(f"{value:9g}" for value in (row.first, row.value, row.limit, row.target))
        lines.append(f"{row.text:52}{numbers}  {state}".rstrip())
    return "\n".join(lines)
