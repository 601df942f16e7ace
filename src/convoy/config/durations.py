"""Read how long an idle model stays loaded, in every form that Ollama knows.

It is apart because flags, files of settings and bodies of requests share it.
"""

from __future__ import annotations

import math
import re

from convoy.errors import ConfigError

DURATION_FORMS = "seconds, a duration such as 5m, 0 for at once, or never"
_UNIT_S = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ns|us|ms|s|m|h)")
_WHOLE = re.compile(rf"(-?)((?:{_PART.pattern}){{1,6}})")
_PLAIN = re.compile(r"-?[0-9]{1,12}(\.[0-9]{1,9})?")
# A timer of a hundred years is none.
_FOREVER_S = 1e9


def duration_s(value: float | str) -> float | None:
    """Return the seconds of a duration: -1 for ever, and None for a value that is none."""
    try:
        seconds = _seconds(value)
    except OverflowError:
        return None
    if seconds is None or not math.isfinite(seconds):
        return None
    return -1.0 if seconds < 0 or seconds > _FOREVER_S else seconds


def kept_s(value: float | str) -> float | None:
    """Return the seconds of a setting; None for ever. Raises ConfigError for a value that is no duration."""
    seconds = duration_s(value)
    if seconds is None:
        raise ConfigError(
            f"keep_alive is {str(value)[:40]!r}, expected {DURATION_FORMS}",
            hint="for example --keep-alive 5m",
        )
    return None if seconds < 0 else seconds


def _seconds(value: float | str) -> float | None:
    if not isinstance(value, str):
        return float(value)
    if value == "never":
        return -1.0
    if (whole := _WHOLE.fullmatch(value)) is not None:
        total = sum(float(number) * _UNIT_S[unit] for number, unit in _PART.findall(whole[2]))
        return -total if whole[1] else total
    return float(value) if _PLAIN.fullmatch(value) else None
