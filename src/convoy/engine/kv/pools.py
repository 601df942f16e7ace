"""One pool of blocks for each cache group, and the number of blocks that a sequence needs of each."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from convoy.engine.kv.block_pool import BlockPool
from convoy.engine.kv.limits import GroupLimits
from convoy.engine.sequence import Sequence
from convoy.wire.messages.control import BlockGrant


class BlockPools:
    """Account for the blocks of all cache groups at once.

    A sequence has one table in each group, and gets all the blocks it needs or none. A table of a group with
    a ring grows to the ring's size and no further; a longer sequence reuses its blocks in order.
    """

    def __init__(self, groups: SequenceOf[GroupLimits], block_size: int) -> None:
        self.block_size = block_size
        self._rings = [group.ring for group in groups]
        # Tokens of a block.
        self._spans = [block_size * group.stride for group in groups]
        self._pools = [BlockPool(group.num_blocks, block_size) for group in groups]

    def __getitem__(self, group: int) -> BlockPool:
        """Return a group's pool."""
        return self._pools[group]

    @property
    def first(self) -> BlockPool:
        """Return the first group's pool; where there is one group, it is the only pool."""
        return self._pools[0]

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks of all groups."""
        return sum(pool.num_blocks for pool in self._pools)

    @property
    def num_free(self) -> int:
        """Return the number of blocks of all groups that no sequence owns."""
        return sum(pool.num_free for pool in self._pools)

    @property
    def usage(self) -> float:
        """Return the owned share of the fullest group's blocks; 1 where none is free."""
        return max(
            (1 - pool.num_free / pool.num_blocks for pool in self._pools if pool.num_blocks), default=0.0
        )

    @property
    def max_tokens(self) -> int:
        """Return how many tokens a sequence may have that owns every block alone."""
        room = [
            pool.num_blocks * span
            for pool, ring, span in zip(self._pools, self._rings, self._spans, strict=True)
            if ring is None or pool.num_blocks < ring
        ]
        return min(room, default=sys.maxsize)

    def needed(self, num_tokens: int) -> list[int]:
        """Return how many blocks of each group a sequence of ``num_tokens`` has."""
        whole = [-(-num_tokens // span) for span in self._spans]
        pairs = zip(whole, self._rings, strict=True)
        return [count if ring is None else min(count, ring) for count, ring in pairs]

    def missing(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Return how many blocks of each group a sequence lacks for ``num_tokens``; empty for none."""
        tables = sequence.tables
        if not tables:
            return self.needed(num_tokens)
        # Most rows lack nothing, so look for that case first.
        for table, ring, span in zip(tables, self._rings, self._spans, strict=True):
            if len(table) * span < num_tokens and len(table) != ring:
                break
        else:
            return []
        return [
            max(0, most - len(table)) for most, table in zip(self.needed(num_tokens), tables, strict=True)
        ]

    def have_room(self, counts: SequenceOf[int], kept: SequenceOf[SequenceOf[int]] = ()) -> bool:
        """Return whether ``counts`` blocks of each group are free, less the group's ``kept`` ones."""
        free = [pool.num_free for pool in self._pools]
        for group, blocks in enumerate(kept):
            free[group] -= self._pools[group].num_unowned(blocks)
        return all(count <= 0 or count <= room for count, room in zip(counts, free, strict=True))

    def grow(self, sequence: Sequence, counts: SequenceOf[int]) -> list[BlockGrant]:
        """Append ``counts`` blocks to a sequence's tables, after `have_room`, and return the grants."""
        if not sequence.tables:
            sequence.tables = [[] for _ in self._pools]
        grants = []
        for group, count in enumerate(counts):
            if count > 0:
                blocks = self._pools[group].allocate(count)
                sequence.tables[group].extend(blocks)
                grants.append(BlockGrant.append(sequence.table_id, group, blocks))
        return grants

    def num_writable(self, sequence: Sequence, spared: int) -> int:
        """Return how many positions a sequence may write if ``spared`` blocks of each group stay free."""
        room = sys.maxsize
        for pool, ring, span, table in zip(
            self._pools, self._rings, self._spans, sequence.tables, strict=True
        ):
            count = len(table) + max(0, pool.num_free - spared)
            if ring is None or count < ring:
                room = min(room, count * span)
        return room

    def release(self, sequence: Sequence) -> None:
        """Give all of a sequence's blocks back."""
        for pool, table in zip(self._pools, sequence.tables, strict=False):
            pool.free(table)
        sequence.tables = []

    def check_changed(self, *, idle: bool) -> None:
        """Check every group, as `BlockPool.check_changed` does; with ``idle``, every block must be free."""
        for pool in self._pools:
            pool.check_changed()
        self._check_idle(idle)

    def check(self, sequences: Iterable[Sequence], *, idle: bool) -> None:
        """Assert that every block has the right owners; with ``idle``, that every block is free."""
        tables = [sequence.tables for sequence in sequences if sequence.tables]
        for group, (pool, ring) in enumerate(zip(self._pools, self._rings, strict=True)):
            pool.check(block for of_one in tables for block in of_one[group])
            longest = max((len(of_one[group]) for of_one in tables), default=0)
            assert ring is None or longest <= ring, "a ring has more blocks than it needs"
        self._check_idle(idle)

    def _check_idle(self, idle: bool) -> None:
        assert not idle or self.num_free == self.num_blocks, "idle, but blocks are owned"
