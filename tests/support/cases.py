"""Run a few cases that cover every kind in `make test`, and all of them in `make test-long`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def cases(every: Iterable[Any], is_quick: Callable[[Any], bool]) -> list[object]:
    """Return all cases as parameters of a test, each tuple spread out. Those that are not quick are marked
    long.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=() if is_quick(case) else pytest.mark.long
        )
        for case in every
    ]
