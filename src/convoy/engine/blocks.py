"""The head's account of K/V blocks: which are free, never what is in them."""

from __future__ import annotations

from collections.abc import Sequence


class BlockPool:
    """Block ids 0..num_blocks-1 of ``block_size`` tokens each, valid on every stage alike."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Last freed, first granted: the hottest block is the likeliest to be in a cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._owned: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold ``num_tokens``."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks; the caller has looked at ``num_free``."""
        assert count <= len(self._free), "the scheduler asked for more blocks than are free"
        blocks = [self._free.pop() for _ in range(count)]
        self._owned.update(blocks)
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back."""
        for block in reversed(blocks):
            assert block in self._owned, "a block was freed twice"
            self._owned.remove(block)
            self._free.append(block)

    def check(self) -> None:
        """Free and owned blocks together are all blocks, none twice."""
        assert len(self._free) + len(self._owned) == self.num_blocks, "blocks leaked"
        assert not self._owned.intersection(self._free), "a block is both free and owned"
