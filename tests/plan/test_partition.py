"""Largest remainder: the published vectors, and what must hold for any weights."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.errors import PlanError
from convoy.plan.partition import partition, shares


@pytest.mark.parametrize(("num_layers", "expected"), [(40, [24, 16]), (24, [15, 9]), (30, [18, 12])])
def test_weights_22_to_14_give_the_published_shares(num_layers: int, expected: list[int]) -> None:
    assert shares(num_layers, [22, 14]) == expected
    assert shares(num_layers, [22e9, 14e9]) == expected


def test_ties_go_to_the_lowest_index() -> None:
    assert shares(11, [1, 1]) == [6, 5]
    assert shares(8, [1, 1, 1]) == [3, 3, 2]
    assert partition(8, [1, 1, 1]) == [(0, 3), (3, 6), (6, 8)]


def test_every_member_gets_a_layer_from_the_one_with_most() -> None:
    assert shares(4, [1000, 1, 1]) == [2, 1, 1]
    assert shares(3, [1, 10**30, 1]) == [1, 1, 1]


@given(st.integers(1, 200), st.data())
def test_runs_are_contiguous_disjoint_covering_and_never_empty(num_layers: int, data: st.DataObject) -> None:
    weight = st.one_of(st.integers(1, 10**13), st.floats(1e-9, 1e13, allow_nan=False))
    weights = data.draw(st.lists(weight, min_size=1, max_size=min(num_layers, 12)))
    runs = partition(num_layers, weights)
    assert len(runs) == len(weights)
    assert [layer for start, end in runs for layer in range(start, end)] == list(range(num_layers))
    assert all(start < end for start, end in runs)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=6))
def test_shares_stay_within_one_layer_of_the_quota_where_all_have_one(weights: list[int]) -> None:
    num_layers = 40
    quotas = [num_layers * weight / sum(weights) for weight in weights]
    if min(quotas) < 1:
        return
    for count, quota in zip(shares(num_layers, weights), quotas, strict=True):
        assert abs(count - quota) < 1


@pytest.mark.parametrize(
    ("num_layers", "weights", "expected"),
    [
        (4, [], "no members to share the layers"),
        (2, [1, 1, 1], "3 members cannot share 2 layers"),
        (4, [1, 0], "weight 0 of member 1 is not a positive number"),
        (4, [-1.5, 1], "weight -1.5 of member 0"),
        (4, [math.nan, 1], "weight nan of member 0"),
        (4, [1, math.inf], "weight inf of member 1"),
    ],
)
def test_impossible_shares_are_refused(num_layers: int, weights: list[float], expected: str) -> None:
    with pytest.raises(PlanError, match=expected):
        shares(num_layers, weights)
