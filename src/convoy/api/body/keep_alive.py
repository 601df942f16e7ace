"""Read how long a model stays loaded after a request: seconds, or a duration such as 5m, as Ollama has it."""

from __future__ import annotations

import math
import re

from convoy.errors import RequestError

FIELD = "keep_alive"
_UNIT_S = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ns|us|ms|s|m|h)")
_WHOLE = re.compile(rf"(-?)((?:{_PART.pattern}){{1,6}})")
# A timer of a hundred years is none.
_FOREVER_S = 1e9


def read_keep_alive(value: float | str | None) -> float | None:
    """Return the seconds of the field: negative for ever, None if it is not given. Raises `RequestError`."""
    if value is None:
        return None
    seconds = _seconds(value)
    if seconds is None or not math.isfinite(seconds):
        raise RequestError(
            f"{FIELD} is {str(value)[:40]!r}, expected seconds or a duration such as 5m",
            param=FIELD,
            hint="0 unloads the model after the answer, and -1 keeps it",
        )
    return -1.0 if seconds < 0 or seconds > _FOREVER_S else seconds


def _seconds(value: float | str) -> float | None:
    if not isinstance(value, str):
        return float(value)
    if (whole := _WHOLE.fullmatch(value)) is not None:
        total = sum(float(number) * _UNIT_S[unit] for number, unit in _PART.findall(whole[2]))
        return -total if whole[1] else total
    return float(value) if re.fullmatch(r"-?[0-9]{1,12}", value) else None
