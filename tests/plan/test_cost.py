"""Cuts between equal members: stages that take the same time, as near as layers let them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.model.checkpoints.synthetic import CONFIGS
from convoy.plan.cost import TokenCost, balanced, equals, layer_costs, output_cost
from convoy.plan.memory.memory import stage_bytes
from convoy.plan.placement.placement import place
from convoy.plan.span import Span
from convoy.plan.spec.model import ModelSpec
from plan.placement.test_placement import GB, members, spec_of
from support.examples import examples

LLAMA = ModelSpec.from_config(CONFIGS["llama-250m"], "llama-250m")


def spread(costs: Sequence[int], extras: Sequence[int], counts: Sequence[int]) -> tuple[int, int]:
    """Return the dearest stage, and the sum of squares."""
    ends = list(itertools.accumulate(counts))
    stages = [
        sum(costs[end - count : end]) + extra for count, end, extra in zip(counts, ends, extras, strict=True)
    ]
    return max(stages), sum(stage**2 for stage in stages)


def best(costs: Sequence[int], extras: Sequence[int]) -> tuple[int, int]:
    """Find the best by trying every cut."""
    num_layers = len(costs)
    cuts = itertools.combinations(range(1, num_layers), len(extras) - 1)
    return min(
        spread(costs, extras, [b - a for a, b in itertools.pairwise([0, *inner, num_layers])])
        for inner in cuts
    )


@settings(max_examples=examples(400))
@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=10),
    st.lists(st.integers(0, 200), min_size=1, max_size=5),
)
def test_no_cut_has_a_cheaper_dearest_stage_nor_more_level_ones(costs: list[int], extras: list[int]) -> None:
    extras = extras[: len(costs)]
    counts = balanced(costs, extras)
    assert len(counts) == len(extras)
    assert sum(counts) == len(costs)
    assert min(counts) >= 1
    assert spread(costs, extras, counts) == best(costs, extras)


def test_the_stage_with_the_output_gets_fewer_layers() -> None:
    two = [(s.start, s.end) for s in place(LLAMA, members(8 * GB, 8 * GB)).stages]
    assert two == [(0, 7), (7, 16)], "lm_head is as much as 2.9 layers"
    assert round(output_cost(LLAMA) / layer_costs(LLAMA)[0], 1) == 2.9
    reverse = place(LLAMA, members(8 * GB, 8 * GB), {"beta": "0:8"})
    assert [(s.member, s.start) for s in reverse.stages] == [("beta", 0), ("alpha", 9)]
    three = [s.end - s.start for s in place(LLAMA, members(8 * GB, 8 * GB, 8 * GB)).stages]
    assert three == [4, 6, 6]


def test_in_the_forward_layout_the_last_member_gets_fewer_layers() -> None:
    stages = place(LLAMA, members(*[8 * GB] * 4), {"alpha": "0:3"}).stages
    assert [(s.end - s.start, s.output) for s in stages] == [(4, False), (5, False), (5, False), (2, True)]


@pytest.mark.parametrize(
    ("sizes", "threads", "expected"),
    [
        ((8 * GB, 8 * GB), (2, 2), True),
        ((8 * GB, 7.5 * GB), (2, 2), True),
        ((8 * GB, 7 * GB), (2, 2), False),
        ((8 * GB, 8 * GB), (2, 4), False),
        ((8 * GB, 8 * GB), (0, 0), True),
    ],
)
def test_members_are_equal_with_as_many_threads_and_nearly_as_much_memory(
    sizes: tuple[float, ...], threads: tuple[int, ...], *, expected: bool
) -> None:
    offers = [
        replace(offer, num_threads=count)
        for offer, count in zip(members(*map(int, sizes)), threads, strict=True)
    ]
    assert equals(offers) is expected


def test_unequal_members_share_by_memory() -> None:
    assert [(s.start, s.end) for s in place(LLAMA, members(3 * GB, GB)).stages] == [(0, 12), (12, 16)]


def test_memory_limits_come_before_level_stages() -> None:
    room = stage_bytes(LLAMA, Span(0, 6, output=True), "float32")
    placement = place(LLAMA, members(room, room))
    assert [(s.start, s.end) for s in placement.stages] == [(0, 6), (6, 16)], "the embedding fills alpha"


def test_attention_weighs_more_the_later_a_token_comes() -> None:
    cost = TokenCost.of(LLAMA)
    layer = LLAMA.layers[0].elements
    assert cost.of_chunk(0, 1) == pytest.approx(1 + 0.5 * 2 * 1024 / layer)
    assert cost.of_chunk(8000, 1) == pytest.approx(1 + 8000.5 * 2 * 1024 / layer)


def test_a_window_bounds_what_attention_costs() -> None:
    windowed = spec_of(model_type="mistral", num_key_value_heads=4, sliding_window=64)
    cost = TokenCost.of(windowed)
    assert cost.of_chunk(100, 16) == cost.of_chunk(4000, 16)
    assert TokenCost.of(spec_of()).of_chunk(4000, 16) > cost.of_chunk(4000, 16)


@given(st.integers(0, 20_000), st.integers(1, 4096))
def test_a_level_chunk_costs_no_more_than_the_first_and_never_grows(start: int, most: int) -> None:
    cost = TokenCost.of(LLAMA)
    chunk = cost.level_chunk(start, most)
    assert 1 <= chunk <= most
    assert chunk % 16 == 0 or chunk == most
    assert chunk <= 16 or cost.of_chunk(start, chunk) <= cost.of_chunk(0, most)
    assert chunk == most or cost.of_chunk(start, chunk + 16) > cost.of_chunk(0, most)
    assert cost.level_chunk(start + 1000, most) <= chunk <= cost.level_chunk(0, most) == most
