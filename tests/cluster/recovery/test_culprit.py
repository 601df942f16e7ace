"""The member that holds a late step, by the answers of the members of a ring."""

from __future__ import annotations

import pytest

from convoy.cluster.recovery.fault import find_holder

RING = ("beta", "gamma", "delta")


@pytest.mark.parametrize(
    ("reached", "keeps"),
    [
        ({"beta": 7, "gamma": 7, "delta": 7}, None),
        ({"beta": 7, "gamma": 7, "delta": 6}, "delta"),
        ({"beta": 6, "gamma": 5, "delta": 5}, "beta"),
        ({"beta": 7, "gamma": -1, "delta": 6}, "gamma"),
        ({"gamma": 6, "delta": 6}, "beta"),
        ({"beta": 7, "delta": 6}, "gamma"),
        ({"gamma": 7, "delta": 6}, "delta"),
        ({}, "delta"),
        ({"beta": 7}, "delta"),
        ({"delta": 6}, "gamma"),
    ],
)
def test_the_step_stands_where_nobody_behind_has_it(reached: dict[str, int], keeps: str | None) -> None:
    assert find_holder(RING, reached, 7) == keeps
