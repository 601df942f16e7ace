"""Make the flags of settings from their rows in `config.table`: names, limits, help and default."""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, get_origin

import typer

from convoy.config.table import row


def option(table: str, key: str) -> Any:
    """Return the typer option of a setting that has a flag.

    Its value is None unless it was given, so that the file's value counts.
    """
    found = row(table, key)
    flag = found.setting.flag
    assert flag is not None, f"[{table}] {key} has no flag"
    default = flag.shown or found.default_text
    return typer.Option(
        *flag.names,
        min=flag.least,
        max=flag.most,
        help=f"{flag.help}  [default: {default}]" if default else flag.help,
        show_default=False,
    )


def flag(table: str, key: str) -> Any:
    """Return the annotation of a verb's parameter for a setting."""
    kind = row(table, key).kind
    if get_origin(kind) is tuple:
        kind = list[str]
    elif row(table, key).choices or isinstance(kind, UnionType):
        kind = str
    return Annotated[kind | None, option(table, key)]
