import pytest

from convoy.engine.blocks import BlockPool


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
