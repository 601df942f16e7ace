"""Write docs/commands.md, the reference of every command, from the command line's own help.

    python scripts/commands.py           write the page
    python scripts/commands.py --check   compare it with the help; exit 1 if it is not current

The page depends neither on the width of the terminal nor on the home folder: it is made from the rows of the
help pages before they are laid out.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer.main

from convoy.cli.main import app

PAGE = Path(__file__).resolve().parents[1] / "docs" / "commands.md"
INTRODUCTION = """\
# Commands

Made by `scripts/commands.py` from the help of each command; do not edit. `make check` compares the two.

Every command takes `-h` and `--help`. Put `--log-level LEVEL` and `--log-format json` before the verb, as in
`convoy --log-level info serve demo`; `convoy --version` prints the version. Layer spans are inclusive.
"""
RANGE = r"[\d.<=]*x[<>=\d.]+"
# The help puts an option's default and its limits behind the text, in brackets.
EXTRA = re.compile(rf"\s*\[(default: [^\[\]]*|required|{RANGE})\]$")
LIMITS = re.compile(rf"(?:^|; )({RANGE})$")
HELP = "-h, --help"


@dataclass
class Rows:
    """Record the sections of a help page; stands in for the formatter that lays them out."""

    width: int = 10_000
    sections: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    name: str = ""

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        self.name = name
        yield

    def write_dl(self, rows: list[tuple[str, str]]) -> None:
        self.sections.setdefault(self.name, []).extend(rows)


@dataclass(frozen=True)
class Verb:
    """Name one command with its place in the tree: ``path`` is what a user types."""

    path: str
    command: Any
    context: Any

    def rows(self) -> dict[str, list[tuple[str, str]]]:
        """Return the rows of the help page by section, without those of ``--help`` itself."""
        recorder = Rows()
        self.command.format_options(self.context, recorder)
        kept = {name: [row for row in rows if row[0] != HELP] for name, rows in recorder.sections.items()}
        return {name: rows for name, rows in kept.items() if rows}

    def children(self) -> list[Verb]:
        """Return the visible commands below this one, in the order of the help page."""
        commands = getattr(self.command, "commands", {})
        return [
            Verb(f"{self.path} {name}", command, _context(command, name, self.context))
            for name, command in commands.items()
            if not command.hidden
        ]


def _context(command: Any, name: str, parent: Any = None) -> Any:
    return command.context_class(command, info_name=name, parent=parent, **command.context_settings)


def write_page() -> str:
    """Return the whole page as Markdown."""
    command = typer.main.get_command(app)
    root = Verb("convoy", command, _context(command, "convoy"))
    parts = [INTRODUCTION]
    for group, rows in root.rows().items():
        parts.append(f"## {group}\n")
        names = [name.strip() for name, _ in rows]
        parts.append(_table("command", "purpose", [(_link(name), text) for name, text in rows]))
        by_name = {verb.path.removeprefix("convoy "): verb for verb in root.children()}
        parts += [section for name in names for section in _sections(by_name[name], 3)]
    return "\n".join(parts)


def _link(name: str) -> str:
    return f"[`convoy {name.strip()}`](#convoy-{name.strip()})"


def _sections(verb: Verb, level: int) -> Iterator[str]:
    """Yield the section of ``verb`` and those of the commands below it."""
    pieces = " ".join(verb.command.collect_usage_pieces(verb.context))
    text = " ".join((verb.command.help or "").split())
    yield f"{'#' * level} convoy {verb.path.removeprefix('convoy ')}\n"
    yield f"{textwrap.fill(text, 108)}\n\n```\n{verb.path} {pieces}\n```\n"
    children = verb.children()
    for name, rows in verb.rows().items():
        if name == "Commands":
            continue
        yield _options(name, rows)
    for child in children:
        yield from _sections(child, level + 1)


def _options(name: str, rows: list[tuple[str, str]]) -> str:
    lines = [f"| {name} | meaning | default | limits |", "| --- | --- | --- | --- |"]
    for option, text in rows:
        meaning, default, limits = _split(text)
        lines.append(f"| {_code(option)} | {_cell(meaning)} | {_value(default)} | {_value(limits)} |")
    return "\n".join(lines) + "\n"


def _split(text: str) -> tuple[str, str, str]:
    """Return the meaning of an option, its default and its limits."""
    default, limits = "", ""
    while found := EXTRA.search(text):
        text, extra = text[: found.start()], found[1]
        if ranged := LIMITS.search(extra):
            limits, extra = ranged[1], extra[: ranged.start()]
        default = extra.removeprefix("default: ") or default
    return text, default, limits


def _table(first: str, second: str, rows: list[tuple[str, str]]) -> str:
    lines = [f"| {first} | {second} |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {name} | {_cell(text)} |" for name, text in rows)]) + "\n"


def _code(text: str) -> str:
    return "`" + " ".join(text.split()).replace("|", "\\|") + "`"


def _value(text: str) -> str:
    """Return a default or a limit as one cell: a single word is a value, several words describe one."""
    return _cell(text) if " " in text or text in {"", "required"} else _code(text)


def _cell(text: str) -> str:
    """Return ``text`` as one cell of a table, in which nothing is markup but code."""
    parts = " ".join(text.split()).split("`")
    for at in range(0, len(parts), 2):
        parts[at] = re.sub(r"([<>*_\[\]])", r"\\\1", parts[at])
    return "`".join(parts).replace("|", "\\|")


def main() -> int:
    parser = argparse.ArgumentParser(description="Write or check the reference of the commands.")
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 if it is not current")
    page = write_page()
    if not parser.parse_args().check:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page:
        return 0
    print(
        "error: docs/commands.md was made from other help texts than the commands have now", file=sys.stderr
    )
    print("hint: run `python scripts/commands.py`, read the difference and commit it", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
