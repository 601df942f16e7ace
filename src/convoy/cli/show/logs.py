"""``--log-level`` and ``--log-format``, before the verb: the log of programs that run for weeks.

Lines go to standard error. The level is for Convoy's own packages. Of libraries, only warnings are shown:
their debug lines may hold an HTTP header or the values of a database statement.
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
# The attribute of a record with further fields.
_MORE = "convoy_more"
_FIELD = re.compile(r"(?:(?P<name>[a-z][a-z0-9_]*)=)?%[-+ #0]*\d*(?:\.\d+)?(?P<kind>[a-z%])")


class TextLines(logging.Formatter):
    """Format a record as one line. Below it, show where an error came from, without the library's words."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{self.formatTime(record, '%H:%M:%S')} {record.getMessage()}"
        return "\n".join([line, *(_places(record.exc_info[1]) if record.exc_info else ())])


class JsonLines(logging.Formatter):
    """Format a record as one JSON object: time (RFC 3339, UTC), level, logger, message, and its fields.

    A message names a field with ``name=%s``. Names come from this code and never from a value, so that text
    of a user or a peer cannot add a field.
    """

    def format(self, record: logging.LogRecord) -> str:
        whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{whole}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, _MORE, {}),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = _places(record.exc_info[1])
        return json.dumps(line, ensure_ascii=True)


def _places(error: BaseException | None) -> list[str]:
    """Return the error's classes and places, the cause last.

    The message of an error of Python or of a library is left out, because it may quote a prompt.
    """
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
        # %% consumes no argument.
        if match["kind"] == "%" or not arguments:
            continue
        value = arguments.pop(0)
        name = match["name"]
        # A field must not replace one of the fixed keys.
        if name is not None and name not in {"time", "level", "logger", "message", "traceback"}:
            found[name] = value if isinstance(value, bool | int | float | str) else str(value)
    return found


class _Said(logging.StreamHandler):  # type: ignore[type-arg]
    """Mark our own handler among those that other code may have added."""


def set_up_logs(level: Level = "warning", form: Format = "text") -> None:
    """Log libraries at warning and Convoy's packages at ``level``, in this process. May be called again."""
    out = _Said(sys.stderr)
    out.setFormatter(JsonLines() if form == "json" else TextLines())
    root = logging.getLogger()
    # Replace only our own handler: tests and libraries may have added others.
    root.handlers = [*(one for one in root.handlers if not isinstance(one, _Said)), out]
    logging.getLogger("convoy").setLevel(level.upper())


def json_line(text: str, level: Level = "info", **more: str | None) -> str | None:
    """Return a text for a person as a line of the log in JSON; None unless `set_up_logs` chose that form.

    ``more`` are further fields of it.
    """
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _Said) and isinstance(handler.formatter, JsonLines):
            record = {"name": "convoy", "levelname": level.upper(), "msg": text, _MORE: more}
            return handler.format(logging.makeLogRecord(record))
    return None
