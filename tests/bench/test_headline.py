"""A bench says its best figures in one line before the table."""

from __future__ import annotations

import pytest

from convoy.cli.benches.run import headline


@pytest.mark.parametrize(
    ("unit", "told"),
    [
        ("tokens/s", "at best, in tokens/s: members 1 12.5, members 2 20"),
        ("ms for a token", "at best, in ms for a token: members 1 3, members 2 20"),
        ("s to the next token", ""),
    ],
)
def test_the_best_figure_of_each_line_is_said_where_there_is_a_best(unit: str, told: str) -> None:
    lines = {"members 1": [(1.0, 3.0), (4.0, 12.5)], "members 2": [(1.0, 20.0)], "none": []}
    assert headline(unit, lines) == told
