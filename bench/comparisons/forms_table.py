"""Print reports of `bench/compare.py llama` or `convoy bench formats` as a table in Markdown.

Run it as ``PYTHONPATH=bench python -m comparisons.forms_table FILE...``; the files may hold parts of a table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Cells = dict[tuple[str, int], str]


def main(paths: Iterable[str]) -> None:
    """Print the table of all rows of the files."""
    rows = [row for path in paths for row in json.loads(Path(path).read_text(encoding="utf-8"))["rows"]]
    sys.stdout.write("\n".join(table(rows)) + "\n")


def table(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table: a line for each form and number of members, a cell for each rate.

    A cell has Convoy's rate, that of the other program, and the median ratio of both where both ran.
    """
    sizes: dict[str, str] = {}
    own: dict[tuple[str, int], Cells] = {}
    theirs: dict[tuple[str, int], Cells] = {}
    for row in rows:
        if "stored_bytes" in row:
            sizes[row["form"]] = f"{row['resident_bytes'] / 1e6:.0f} MB"
            continue
        key, column = (row["form"], row["members"]), (row["what"], row["number"])
        if row["through"] == "llama.cpp":
            theirs.setdefault(key, {})[column] = _rate(row)
        else:
            beside = theirs.get(key, {}).get(column)
            times = f" / {beside} ({row['times']:.2f})" if beside and row["times"] else ""
            own.setdefault(key, {})[column] = _rate(row) + times
    columns = sorted({column for cells in own.values() for column in cells}, key=lambda one: (one[0], one[1]))
    head = ["form", "members", "memory", *(f"{what} {number}" for what, number in columns)]
    lines = [
        [
            form,
            str(members),
            sizes.get(form, "") if members == 1 else "",
            *(cells.get(c, "") for c in columns),
        ]
        for (form, members), cells in own.items()
    ]
    rule = ["---", *["---:"] * (len(head) - 1)]
    return [f"| {' | '.join(line)} |" for line in (head, rule, *lines)]


def _rate(row: Mapping[str, Any]) -> str:
    rate = row["tokens_per_s"]
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"


if __name__ == "__main__":
    main(sys.argv[1:])
