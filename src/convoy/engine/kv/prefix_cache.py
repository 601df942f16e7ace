"""Blocks that a sequence may share: full ones of its own prefix and salt, found by their tags."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from convoy.engine.kv.block_pool import BlockPool
from convoy.engine.kv.prefix import PrefixTags
from convoy.engine.sequence import Sequence
from convoy.wire.messages.control import BlockGrant


class PrefixCache:
    """Find and label shareable blocks of the only pool.

    If not ``enabled``, nothing is found or becomes findable.
    """

    def __init__(self, pool: BlockPool, tags: PrefixTags, *, enabled: bool) -> None:
        self._pool = pool
        self._tags = tags
        self._enabled = enabled

    def may_share(self, sequence: Sequence) -> bool:
        """Return whether the cache is searched for this sequence."""
        return self._enabled and not sequence.all_outputs

    def find(self, sequence: Sequence) -> list[int]:
        """Return the blocks of the known prefix.

        The last token is never in one, because at least one token must run.
        """
        if not self.may_share(sequence):
            return []
        num_blocks = (len(sequence.tokens) - 1) // self._pool.block_size
        self._tags.extend(sequence.tags, sequence.tokens, num_blocks)
        return self._pool.find(sequence.tags[1 : num_blocks + 1])

    def share(self, sequence: Sequence, blocks: SequenceOf[int]) -> BlockGrant | None:
        """Start a new sequence with the blocks of `find`; return the grant, or None for no blocks."""
        num_tokens = len(blocks) * self._pool.block_size
        if sequence.num_cached is None:
            sequence.num_cached = num_tokens
        if not blocks:
            return None
        self._pool.share(blocks)
        sequence.tables = [list(blocks)]
        sequence.num_scheduled = num_tokens
        shared = sequence.tags[1 : len(blocks) + 1]
        return BlockGrant(sequence.table_id, 0, list(blocks), b"".join(shared))

    def label(self, sequence: Sequence, start: int, end: int) -> None:
        """Make the blocks filled by [start, end) findable for later steps, which run after this one."""
        size = self._pool.block_size
        if not self._enabled or start // size == end // size:
            return
        self._tags.extend(sequence.tags, sequence.tokens, end // size)
        for index in range(start // size, end // size):
            self._pool.label(sequence.tables[0][index], sequence.tags[index + 1])
