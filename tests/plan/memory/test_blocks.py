"""How many blocks of each cache group there are, in numbers that a person can follow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from convoy.plan.memory.blocks import BlockChoice, BlockDemand, Room, choose_blocks
from convoy.plan.spec.cache import CacheGroup

FULL = CacheGroup("full", None, (1, 3), 4, 2, 8, 8)
NEAR = CacheGroup("window-33", 33, (0, 2), 4, 2, 8, 8)  # a ring of 1 + (32 + 64) / 16 blocks
STATE = CacheGroup("state", None, (4,), 0, 0, 0, 0, kind="recurrent", state_elements=100)
DEMAND = BlockDemand(block_size=16, max_context=320, max_batch=4, max_row_tokens=64)


def test_a_full_batch_of_full_contexts_is_all_that_is_taken() -> None:
    rooms = {"alpha": Room(10**9, (1000, 500)), "beta": Room(10**9, (0, 500))}
    assert choose_blocks([FULL, NEAR], rooms, DEMAND) == BlockChoice((80, 28), 80, "alpha")
    assert choose_blocks([FULL, STATE], rooms, DEMAND).num_blocks == (80, 4)


def test_the_member_with_the_least_room_sets_the_counts_for_all() -> None:
    rooms = {"alpha": Room(10**9, (1000,)), "beta": Room(37_500, (1000,)), "gamma": Room(90_000, (1000,))}
    assert choose_blocks([FULL], rooms, DEMAND) == BlockChoice((37,), 37, "beta")


@pytest.mark.parametrize(
    ("num_bytes", "block_bytes", "num_blocks"),
    [
        (94_000, (1000, 500), (80, 28)),  # everything
        (93_999, (1000, 500), (79, 28)),
        (60_000, (1000, 500), (46, 28)),
        (28_000, (1000, 500), (18, 18)),  # no ring is longer than a table that keeps every token
        (16_000, (100, 500), (80, 14)),  # rings for two sequences take less than half, for three more
        (9_000, (100, 500), (55, 7)),
        (3_000, (100, 500), (5, 5)),  # not even one ring
        (599, (100, 500), (0, 0)),
    ],
)
def test_rings_leave_half_of_the_room_to_what_keeps_every_token(
    num_bytes: int, block_bytes: tuple[int, ...], num_blocks: tuple[int, ...]
) -> None:
    choice = choose_blocks([FULL, NEAR], {"alpha": Room(num_bytes, block_bytes)}, DEMAND)
    assert choice.num_blocks == num_blocks
    takes = sum(count * size for count, size in zip(num_blocks, block_bytes, strict=True))
    assert takes <= num_bytes


def test_a_model_of_windows_alone_has_rings_for_as_many_as_fit() -> None:
    rooms = {"alpha": Room(10_000, (500,))}
    assert choose_blocks([NEAR], rooms, DEMAND).num_blocks == (20,)
    assert choose_blocks([NEAR], {"alpha": Room(10**9, (500,))}, DEMAND).num_blocks == (28,)


def test_what_the_operator_asks_for_bounds_every_group() -> None:
    rooms = {"alpha": Room(10**9, (1000, 500))}
    asked = replace(DEMAND, num_blocks=20)
    assert choose_blocks([FULL, NEAR], rooms, asked).num_blocks == (20, 20)


def test_no_room_is_no_blocks_and_says_whose() -> None:
    rooms = {"alpha": Room(10**9, (1000, 500)), "beta": Room(-5, (1000, 500))}
    assert choose_blocks([FULL, NEAR], rooms, DEMAND) == BlockChoice((0, 0), 0, "beta")
