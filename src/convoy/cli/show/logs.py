"""``--log-level`` and ``--log-format``, before the verb: what programs say while they run for weeks.

Lines go to standard error. Levels are for Convoy's own rooms: what libraries say at their most talkative may
hold a header or a statement's values, so of those only warnings are shown.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import traceback
from typing import Annotated, Literal

import typer

from convoy.errors import ConvoyError

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["text", "json"]

LevelFlag = Annotated[Level, typer.Option(help="How much is logged.")]
FormatFlag = Annotated[Format, typer.Option(help="json: one object on each line.")]

_MAX_PLACES = 200
_FIELD = re.compile(r"(?:(?P<name>[a-z][a-z0-9_]*)=)?%[-+ #0]*\d*(?:\.\d+)?(?P<kind>[a-z%])")


class TextLines(logging.Formatter):
    """A line for each record, and under it where an error came from: in whose words is not said."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{self.formatTime(record, '%H:%M:%S')} {record.getMessage()}"
        return "\n".join([line, *(_places(record.exc_info[1]) if record.exc_info else ())])


class JsonLines(logging.Formatter):
    """One JSON object for each record: time (RFC 3339, UTC), level, logger, message, and its fields.

    A field is what a message names ``name=%s``: names come from this code alone, and never from a value, so
    that nobody whose words are logged can add one.
    """

    def format(self, record: logging.LogRecord) -> str:
        whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{whole}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = _places(record.exc_info[1])
        return json.dumps(line, ensure_ascii=True)


def _places(error: BaseException | None) -> list[str]:
    """Classes and places, the cause last. What an error of Python or a library says may quote a prompt."""
    found: list[str] = []
    while error is not None and len(found) < _MAX_PLACES:
        said = f": {error.message}" if isinstance(error, ConvoyError) else ""
        found.append(f"{type(error).__name__}{said}")
        found += [
            f"  {frame.filename}:{frame.lineno} in {frame.name}"
            for frame in traceback.extract_tb(error.__traceback__)
        ]
        error = error.__cause__ or error.__context__
    return found


def _fields(record: logging.LogRecord) -> dict[str, object]:
    arguments = list(record.args) if isinstance(record.args, tuple) else []
    found: dict[str, object] = {}
    for match in _FIELD.finditer(str(record.msg)):
        if match["kind"] == "%" or not arguments:
            continue
        value = arguments.pop(0)
        name = match["name"]
        if name is not None and name not in {"time", "level", "logger", "message", "traceback"}:
            found[name] = value if isinstance(value, bool | int | float | str) else str(value)
    return found


class _Said(logging.StreamHandler):  # type: ignore[type-arg]
    """Ours, among those that others may have put there."""


def set_up_logs(level: Level = "warning", form: Format = "text") -> None:
    """For this process: libraries at warnings, Convoy's rooms at ``level``. May be called again."""
    out = _Said(sys.stderr)
    out.setFormatter(JsonLines() if form == "json" else TextLines())
    root = logging.getLogger()
    root.handlers = [*(one for one in root.handlers if not isinstance(one, _Said)), out]
    logging.getLogger("convoy").setLevel(level.upper())
