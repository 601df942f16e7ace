"""The head's account of K/V blocks: the free ones, the owners of each, and the prefix tags of full ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


class BlockPool:
    """Account for block ids 0..num_blocks-1 of ``block_size`` tokens each, valid on every stage alike.

    A block is free, owned by one or more sequences, or kept. A kept block has no owner, but is full and
    labelled with the tag of its prefix, so that a sequence with that prefix may share it. Kept blocks are
    taken, oldest first, when no other block is free.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # The block freed last is granted first: it is the likeliest to be in a processor's cache.
        self._free = dict.fromkeys(range(num_blocks - 1, -1, -1))
        self._owners: dict[int, int] = {}
        # Oldest first.
        self._kept: dict[int, None] = {}
        self._tag_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        # The tags that `drop` leaves alone.
        self._marked: set[bytes] = set()
        # Blocks changed since the last check.
        self._changed: set[int] = set()

    @property
    def num_free(self) -> int:
        """Return how many blocks no sequence owns."""
        return len(self._free) + len(self._kept)

    @property
    def num_kept(self) -> int:
        """Return how many of the free blocks hold a prefix that may be shared."""
        return len(self._kept)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold ``num_tokens``."""
        return -(-num_tokens // self.block_size)

    def find(self, tags: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest leading run of ``tags`` that are all in the pool."""
        found = []
        for tag in tags:
            block = self._block_of.get(tag)
            if block is None:
                break
            found.append(block)
        return found

    def has(self, tag: bytes) -> bool:
        """Return whether a block with this tag is in the pool."""
        return tag in self._block_of

    def is_labelled(self, block: int) -> bool:
        """Return whether the block may be found by a tag."""
        return block in self._tag_of

    def num_owners(self, block: int) -> int:
        """Return how many sequences own the block."""
        return self._owners.get(block, 0)

    def num_unowned(self, blocks: Sequence[int]) -> int:
        """Return how many of ``blocks`` count as free until they are shared."""
        return sum(block in self._kept for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """Own blocks that `find` returned, beside any present owners."""
        for block in blocks:
            self._kept.pop(block, None)
            self._owners[block] = self._owners.get(block, 0) + 1
        self._changed.update(blocks)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks; the caller has checked ``num_free``."""
        assert count <= self.num_free, "the scheduler asked for more blocks than are free"
        blocks = [self._free.popitem()[0] if self._free else self._evict() for _ in range(count)]
        self._owners.update(dict.fromkeys(blocks, 1))
        self._changed.update(blocks)
        return blocks

    def label(self, block: int, tag: bytes) -> bool:
        """Mark an owned block as full, with this tag at its end; return whether it has the tag now.

        Of two blocks with the same tag, the first is findable.
        """
        assert block in self._owners, "a block without an owner was labelled"
        if tag not in self._block_of and block not in self._tag_of:
            self._tag_of[block] = tag
            self._block_of[tag] = block
            self._changed.add(block)
        return self._tag_of.get(block) == tag

    def unlabel(self, block: int) -> None:
        """Forget the tag of a block that its only owner is about to write over."""
        assert self._owners.get(block) == 1, "a block of other owners is written over"
        self._forget(block)

    def mark(self, tag: bytes) -> None:
        """Let the block with this tag stay when `drop` is called, whichever sequence labelled it."""
        if tag in self._block_of:
            self._marked.add(tag)

    def drop(self, tag: bytes) -> None:
        """Free the block with this tag, if there is one that is not marked and that no sequence owns."""
        block = self._block_of.get(tag)
        if block in self._kept and tag not in self._marked:
            del self._kept[block]
            self._forget(block)
            self._free[block] = None

    def free(self, blocks: Sequence[int]) -> None:
        """Give a sequence's blocks back, in its order: the end of a chain is evicted before its start."""
        for block in reversed(blocks):
            assert block in self._owners, "a block was freed twice"
            self._owners[block] -= 1
            if self._owners[block]:
                continue
            del self._owners[block]
            if block in self._tag_of:
                self._kept[block] = None
            else:
                self._free[block] = None
        self._changed.update(blocks)

    def check_changed(self) -> None:
        """Check the blocks that changed owners or labels since the last check, as `check` does.

        The last check is one of either kind. The cost grows with the number of changed blocks, not with the
        pool, because a session runs it after every token.
        """
        parts = (self._free, self._kept, self._owners)
        assert sum(len(part) for part in parts) == self.num_blocks, "blocks leaked"
        assert len(self._block_of) == len(self._tag_of), "a label is lost"
        for block in self._changed:
            assert sum(block in part for part in parts) == 1, "a block is in no state, or in two"
            tag = self._tag_of.get(block)
            assert tag is None or self._block_of.get(tag) == block, "a label is lost"
            assert tag is not None or block not in self._kept, "a kept block has no label"
            assert tag is None or block not in self._free, "a free block has a label"
        self._changed.clear()

    def check(self, owned: Iterable[int] | None = None) -> None:
        """Assert that free, kept and owned blocks together are all blocks, none twice.

        ``owned`` lists the blocks of every sequence: each block has as many owners as it is listed times.
        """
        self._changed.clear()
        parts = (self._free, self._kept, self._owners)
        assert sum(len(part) for part in parts) == self.num_blocks, "blocks leaked"
        assert len(set().union(*parts)) == self.num_blocks, "a block is in two states"
        assert self._block_of == {tag: block for block, tag in self._tag_of.items()}, "a label is lost"
        assert set(self._kept) <= set(self._tag_of), "a kept block has no label"
        assert not set(self._tag_of).intersection(self._free), "a free block has a label"
        assert self._marked <= set(self._block_of), "a tag is marked that no block has"
        assert owned is None or Counter(owned) == self._owners, "a block's owners are miscounted"

    def _evict(self) -> int:
        block = next(iter(self._kept))
        del self._kept[block]
        self._forget(block)
        return block

    def _forget(self, block: int) -> None:
        if block in self._tag_of:
            tag = self._tag_of.pop(block)
            del self._block_of[tag]
            self._marked.discard(tag)
            self._changed.add(block)
