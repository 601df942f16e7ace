from collections.abc import Callable

import pytest

from convoy.engine.kv.block_pool import BlockPool


def test_blocks_for_rounds_up() -> None:
    pool = BlockPool(num_blocks=4, block_size=16)
    assert [pool.blocks_for(n) for n in (0, 1, 16, 17, 64)] == [0, 1, 1, 2, 4]


def test_allocated_blocks_are_distinct_and_come_back() -> None:
    pool = BlockPool(num_blocks=4, block_size=16)
    blocks = pool.allocate(3)
    assert len(set(blocks)) == 3
    assert pool.num_free == 1
    pool.free(blocks)
    pool.check()
    assert pool.num_free == 4


def test_a_block_freed_twice_is_noticed() -> None:
    pool = BlockPool(num_blocks=4, block_size=16)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)


def test_what_changed_is_checked_and_the_rest_only_by_the_whole_check() -> None:
    pool = BlockPool(num_blocks=8, block_size=16)
    blocks = pool.allocate(4)
    pool.label(blocks[0], b"tag")
    pool.free(blocks[:2])
    pool.check_changed()
    pool._owners[blocks[2]] += 1  # miscounted, and nothing happened to it since
    pool.check_changed()
    with pytest.raises(AssertionError, match="owners are miscounted"):
        pool.check(blocks[2:])


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("in no state, or in two", lambda pool, block: pool._kept.update({block: pool._free.popitem()[1]})),
        ("leaked", lambda pool, block: pool._owners.pop(block)),
        ("a label is lost", lambda pool, block: pool._block_of.update({b"tag": block + 1})),
    ],
)
def test_what_went_wrong_with_a_block_that_changed_is_noticed(
    name: str, harm: Callable[[BlockPool, int], object]
) -> None:
    pool = BlockPool(num_blocks=8, block_size=16)
    block = pool.allocate(1)[0]
    pool.label(block, b"tag")
    harm(pool, block)
    with pytest.raises(AssertionError, match=name):
        pool.check_changed()
