"""Write the tables of keys in docs/configuration.md from the table of settings, `convoy.config.table`.

python scripts/settings.py           write the tables into the page
python scripts/settings.py --check   compare them; exit 1 if they are not current
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from convoy.config.table import TABLES, SettingRow, rows

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
BEGIN = "<!-- Made by `scripts/settings.py` from `config/table.py`; do not edit. -->"
END = "<!-- The end of the tables. -->"


def write_tables() -> str:
    """Return a heading and a Markdown table for each table of the file."""
    parts = []
    for table in TABLES:
        lines = ["| key | meaning | default | values | flag |", "| --- | --- | --- | --- | --- |"]
        lines += [_line(row) for row in rows(table)]
        parts.append(f"### [{table}]\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _line(row: SettingRow) -> str:
    meaning = row.setting.text + row.setting.more
    values = ", ".join(map(_code, row.choices)) if len(row.choices) > 1 else row.limits
    default = row.default_text
    # One word is a value, and several words describe one.
    default = default if " " in default or not default else _code(default)
    return f"| {_code(row.key)} | {meaning} | {default} | {values} | {_flag(row)} |"


def _flag(row: SettingRow) -> str:
    flag = row.setting.flag
    if flag is None:
        return ""
    names = flag.names[0].split("/") if flag.names else [f"--{row.key.replace('_', '-')}"]
    return ", ".join(map(_code, names))


def _code(text: str) -> str:
    return f"`{text}`"


def write_page(page: str) -> str:
    """Return ``page`` with the present tables between its two marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"error: {PAGE} lacks the marks of the tables")
    return f"{before}{BEGIN}\n\n{write_tables()}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write or check the tables of settings.")
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 if they are not current")
    old = PAGE.read_text(encoding="utf-8")
    new = write_page(old)
    if not parser.parse_args().check:
        PAGE.write_text(new, encoding="utf-8")
        return 0
    if new == old:
        return 0
    print("error: docs/configuration.md has other keys than config/table.py", file=sys.stderr)
    print("hint: run `python scripts/settings.py`, read the difference and commit it", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
