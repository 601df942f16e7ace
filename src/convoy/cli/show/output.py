"""Output for people and scripts: tables and JSON on standard output, errors and hints on standard error."""

from __future__ import annotations

import base64
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, TextIO

import typer

from convoy.cli.show.logs import json_line
from convoy.errors import ConvoyError, RequestError

_QUANTITY = re.compile(r"-?[0-9]+([.][0-9]+)?( ?[A-Za-z%/]+)?")

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON value for scripts.")]
VerboseFlag = Annotated[
    bool, typer.Option("--verbose", help="Also print stages, links and steps of the start.")
]


def print_json(value: object) -> None:
    """Print one JSON value and a line end. `plain` converts values that JSON does not have."""
    print(json.dumps(plain(value), ensure_ascii=False, indent=2), flush=True)


def print_json_line(value: object) -> None:
    """Print one JSON value on one line, for streams of events."""
    print(json.dumps(plain(value), ensure_ascii=False), flush=True)


def plain(value: object) -> object:
    """Return ``value`` in JSON's types. Dataclasses and msgspec Structs become objects, paths text, bytes
    base64.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes | Path):
        return str(value) if isinstance(value, Path) else base64.b64encode(value).decode("ascii")
    names = getattr(value, "__struct_fields__", None) or getattr(value, "__dataclass_fields__", None)
    if names is not None:
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Iterable):
        return [plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no JSON form")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print aligned columns under a heading. Numbers align right; None is a dash; nothing is cut off.

    Cells may come from a peer, and do not draw on the terminal.
    """
    listed = list(rows)
    cells = [["-" if cell is None else one_line(str(cell)) for cell in row] for row in listed]
    widths = [max(len(text) for text in column) for column in zip(columns, *cells, strict=True)]
    right = [_is_numeric(column) for column in zip(*listed, strict=True)] or [False] * len(columns)

    def line(texts: Sequence[str]) -> str:
        padded = (
            text.rjust(width) if rightward else text.ljust(width)
            for text, width, rightward in zip(texts, widths, right, strict=True)
        )
        return "  ".join(padded).rstrip()

    print(styled(line(columns), "bold", sys.stdout))
    for row in cells:
        print(line(row))


def _is_numeric(column: Sequence[object]) -> bool:
    # Sizes and times come as text with a unit: "1.2 MB", "0.31 ms". An address is no number.
    return all(cell is None or _QUANTITY.fullmatch(str(cell)) for cell in column)


def print_fields(fields: Iterable[tuple[str, object]]) -> None:
    """Print ``label value`` lines with the values aligned."""
    listed = [(label, "-" if value is None else str(value)) for label, value in fields]
    width = max((len(label) for label, _ in listed), default=0)
    for label, value in listed:
        print(f"{label.ljust(width)}  {value}")


def print_note(text: str) -> None:
    """Print a line for a person on standard error, apart from results.

    With ``--log-format json`` the line is an object, as those of the log are.
    """
    print(json_line(text) or text, file=sys.stderr, flush=True)


def print_draining(num_answers: int, drain_s: float) -> None:
    """Print how many answers a stopping server waits for, and for how long at most."""
    what = counted(num_answers, "answer")
    print_note(f"finishing {what}, at most {drain_s:g} s; Ctrl-C again to stop now")


def print_ended(num_cut: int) -> None:
    """Print that a server stopped. ``num_cut`` counts the answers that it did not finish."""
    cut = "1 answer was cut off, and its client told"
    if num_cut != 1:
        cut = f"{num_cut} answers were cut off, and their clients told"
    print_note(f"ended: {cut if num_cut else 'every request was answered'}")


def format_bytes(num_bytes: int) -> str:
    """Return ``1536000`` as "1.5 MB", in the decimal units of plans and errors."""
    from convoy.plan.memory.memory import format_bytes as formatted

    return formatted(num_bytes)


def counted(number: int, noun: str) -> str:
    """Return the number and the noun: ``1 token``, ``2 tokens``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def reads_text(source: str) -> str:
    """Return whether a member can read prompts, and from which data: ``yes (activations)``, ``yes (tokens)``,
    ``no``.
    """
    return "no" if source == "no" else f"yes ({source})"


def format_seconds(seconds: float | None) -> str | None:
    """Return ``0.00031`` as "0.31 ms". None stays None, and tables show it as a dash."""
    if seconds is None:
        return None
    return f"{seconds * 1000:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def has_colour(stream: TextIO) -> bool:
    """Return whether ``stream`` is a terminal and its user allows colour (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


_STYLES = {"bold": "1", "red": "1;31", "yellow": "1;33", "dim": "2"}


def styled(text: str, style: str, stream: TextIO) -> str:
    """Return ``text`` in a style of ``_STYLES`` if ``stream`` has colour."""
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if has_colour(stream) else text


def report_error(
    kind: str, message: str, hint: str | None, *, as_json: bool, extra: Mapping[str, object] | None = None
) -> None:
    """Print ``error:`` and ``hint:`` on standard error, and with ``as_json`` one JSON value on standard
    output.

    With ``--log-format json`` both are fields of one line.
    """
    if as_json:
        print_json({"error": {"type": kind, "message": message, "hint": hint, **(extra or {})}})
    # Flush the results first, so that the error is the last output on a terminal.
    sys.stdout.flush()
    message, hint = one_line(message), one_line(hint) if hint else None
    line = json_line(message, "error", hint=hint)
    if line is not None:
        print(line, file=sys.stderr, flush=True)
        return
    print(styled("error:", "red", sys.stderr), message, file=sys.stderr)
    if hint:
        print(styled("hint:", "yellow", sys.stderr), hint, file=sys.stderr)
    sys.stderr.flush()


def report_convoy_error(error: ConvoyError, *, as_json: bool) -> None:
    """Print a `ConvoyError` in the error grammar. Add the parameter that a `RequestError` names."""
    extra = {"param": error.param, "code": error.code} if isinstance(error, RequestError) else {}
    report_error(type(error).__name__, error.message, error.hint, as_json=as_json, extra=extra)


def one_line(text: str) -> str:
    """Return ``text`` without line ends and control characters, so that no file or peer draws on the
    terminal.
    """
    return "".join(char if char.isprintable() else " " for char in text).strip()
