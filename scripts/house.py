"""Print how far the house and its prose are from their targets, or the offences of prose in single files.

    python scripts/house.py                    the table of all figures: old, new, limit and target
    python scripts/house.py --files FILE...    each offence as file:line: reason, and a summary per file
    python scripts/house.py --lower            write the present values as limits, where they are better

FILE is a module, a Markdown page, or a folder of both. Exit code 1: a figure is worse than its limit.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from architecture.prose import LIMITS_FILE, Figure, Prose, figures, measure_file, table  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    """Print the table or the offences. Return 1 if a limit does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--lower", action="store_true")
    given = parser.parse_args(arguments)
    if given.files:
        list_offences(given.files)
        return 0
    rows = figures(ROOT)
    print(table(rows))
    if given.lower:
        lower(rows)
    return 0 if all(row.holds for row in rows) else 1


def list_offences(files: list[Path]) -> None:
    """Print the offences in ``files``, and one line with the figures of each file."""
    for path in _expanded(files):
        found = measure_file(path, path.as_posix())
        for offence in sorted(found.offences, key=_line_of):
            print(offence)
        print(f"{path}: {summary(found)}")


def summary(found: Prose) -> str:
    """Return the figures of one file in a line."""
    told = f"{found.words} words, {1000 * found.riddles / max(1, found.words):.1f} riddle words per 1,000"
    if found.docstrings:
        told += f", {found.verbs} of {found.docstrings} docstrings begin with a verb"
    if found.lines:
        told += f", {found.own_comments} of {found.lines} lines are comments"
    return f"{told}, {len(found.offences)} offences"


def lower(rows: list[Figure]) -> None:
    """Write the value of each figure that is better than its limit as the new limit, at best the target."""
    text = LIMITS_FILE.read_text(encoding="utf-8")
    for row in rows:
        best = max if row.more_is_better else min
        nearest = min(row.value, row.target) if row.more_is_better else max(row.value, row.target)
        limit = best(row.limit, nearest)
        text = re.sub(rf"(\[{row.name}\][^\[]*?\nlimit = )[^\n]+", rf"\g<1>{limit:g}", text)
    LIMITS_FILE.write_text(text, encoding="utf-8")


def _expanded(files: list[Path]) -> Iterator[Path]:
    for path in files:
        if path.is_dir():
            yield from sorted(one for one in path.rglob("*") if one.suffix in {".py", ".md"})
        else:
            yield path


def _line_of(offence: str) -> int:
    match = re.search(r":(\d+):", offence)
    return int(match.group(1)) if match else 0


if __name__ == "__main__":
    sys.exit(main())
