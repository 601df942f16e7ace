"""Find the longest known prefix of a sequence, and keep the blocks that later sequences may begin behind.

A group that keeps every token needs all full blocks before a position. A group with a window needs those of
the last window, and a recurrent group a snapshot of its state there. The position is the end of a block in
every group.

A ring and a state are written over, so their blocks stay only if they are replaced first. That is done at the
marks of a sequence: where its own prefix began, the end of its prompt, and the place at which a prompt left a
known one. The blocks of the last windows before the marks stay, and those that the sequence ends with. So
does a state at the marks, and the last one at the end of a block. All of them lie in blocks that no running
sequence needs, and are evicted like any other. A shared prefix thus takes no memory of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from convoy.engine.kv.limits import SchedulerLimits
from convoy.engine.kv.pools import BlockPools
from convoy.engine.kv.prefix import PrefixTags
from convoy.engine.sequence import Sequence
from convoy.wire.messages.control import BlockGrant

# The next turn of a chat may write the tokens that open an answer in another way, so the mark at the end of a
# prompt lies before as many of its tokens.
_OPENING_TOKENS = 8
# The blocks before a mark's window that stay too, so that a prompt which parts a little earlier finds them.
_SPARE_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class Hit:
    """Hold a known prefix of ``num_tokens``, and its blocks in each cache group.

    ``first`` has the number of each group's first block in the sequence. Groups that keep every token know
    the first ``num_known`` tokens.
    """

    num_tokens: int = 0
    num_known: int = 0
    first: tuple[int, ...] = ()
    blocks: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class _Overwrite:
    """Describe a full block that a row is the first to write over, with run ``run`` of positions.

    Another sequence needs it if ``is_shared``. Otherwise it may stay for later ones if ``is_wanted``.
    """

    group: int
    run: int
    is_shared: bool
    is_wanted: bool


class PrefixCache:
    """Find, share and label the blocks of prefixes, in the pools of all cache groups.

    Nothing is found or becomes findable where ``limits`` share no prefixes.
    """

    def __init__(self, pools: BlockPools, limits: SchedulerLimits, tags: PrefixTags) -> None:
        groups = limits.groups
        self._pools = pools
        self._tags = tags
        self._enabled = limits.shares_prefixes
        self._size = limits.block_size
        self._strides = [group.stride for group in groups]
        # A prefix ends at a multiple of so many tokens.
        self._unit = limits.block_size * math.lcm(*self._strides)
        self._full = [index for index, group in enumerate(groups) if group.ring is None]
        self._states = [index for index, group in enumerate(groups) if group.is_state]
        # Each ring's blocks and window.
        self._rings = {
            index: (group.ring, group.window)
            for index, group in enumerate(groups)
            if group.ring is not None and group.window is not None
        }
        self._replaces = self._enabled and len(self._full) < len(groups)

    def may_share(self, sequence: Sequence) -> bool:
        """Return whether the cache is searched for this sequence."""
        return self._enabled and not sequence.all_outputs

    def find(self, sequence: Sequence) -> Hit:
        """Return the longest known prefix.

        The last token is never in it, because at least one token must run.
        """
        if not self.may_share(sequence):
            return Hit()
        known = (len(sequence.tokens) - 1) // self._unit * self._unit
        self._tags.extend(sequence.tags, sequence.tokens, known // self._size)
        full = {}
        for group in self._full:
            stride = self._strides[group]
            full[group] = self._pools[group].find(sequence.tags[stride : known // self._size + 1 : stride])
            known = min(known, len(full[group]) * stride * self._size) // self._unit * self._unit
        end = known
        while end and (lower := self._retained(sequence, end)) < end:
            end = lower
        if not end:
            return Hit(num_known=known)
        first = [0 if group in full else self._first(group, end) for group in range(len(self._strides))]
        blocks = [
            tuple(full[group][: end // (self._size * stride)])
            if group in full
            else tuple(self._pools[group].find(sequence.tags[first[group] + 1 : end // self._size + 1]))
            for group, stride in enumerate(self._strides)
        ]
        return Hit(end, known, tuple(first), tuple(blocks))

    def missing(self, hit: Hit, counts: list[int]) -> list[int]:
        """Return how many of the ``counts`` blocks of each group a sequence with this prefix lacks."""
        if not hit.num_tokens:
            return counts
        lacking = [count - len(blocks) for count, blocks in zip(counts, hit.blocks, strict=True)]
        for group in self._states:
            # A state that another sequence still has must be copied; otherwise its own block may be used.
            lacking[group] += self._pools[group].num_owners(hit.blocks[group][0]) > 0
        return lacking

    def share(self, sequence: Sequence, hit: Hit) -> list[BlockGrant]:
        """Start a new sequence with the blocks of `find`; return the grants."""
        if sequence.num_cached is None:
            sequence.num_cached = hit.num_tokens
        prompt_end = max(0, sequence.num_prompt - _OPENING_TOKENS) // self._unit * self._unit
        sequence.marks = frozenset((hit.num_tokens, prompt_end, hit.num_known) if self._replaces else ())
        sequence.passing = None
        if not hit.num_tokens:
            return []
        sequence.num_scheduled = hit.num_tokens
        # Own all shared blocks first, so that no allocation evicts one of them.
        for group, blocks in enumerate(hit.blocks):
            self._pools[group].share(blocks)
        return [self._begin(sequence, hit, group) for group in range(len(self._strides))]

    def label(self, sequence: Sequence, start: int, end: int) -> None:
        """Make the blocks filled by [start, end) findable for later steps, which run after this one."""
        size = self._size
        if not self._enabled or start // size == end // size:
            return
        self._tags.extend(sequence.tags, sequence.tokens, end // size)
        for group, stride in enumerate(self._strides):
            if group in self._states:
                continue
            table, span = sequence.tables[group], size * stride
            for run in range(start // span, end // span):
                self._pools[group].label(table[run % len(table)], sequence.tags[(run + 1) * stride])
        if self._states and end % self._unit == 0:
            self._label_states(sequence, end)

    def cut(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many of the next ``num_tokens`` come before the next mark, where a state must stand."""
        if not self._states:
            return num_tokens
        start = sequence.num_scheduled
        return min(
            (mark - start for mark in sequence.marks if start < mark < start + num_tokens), default=num_tokens
        )

    def num_shared(self, sequence: Sequence, end: int) -> list[int]:
        """Return how many blocks of each group a row up to ``end`` needs in place of those that others share.

        The list is empty for none.
        """
        counts: list[int] = []
        if not self._enters_block(sequence, end):
            return counts
        for one in self._overwritten(sequence, end):
            if one.is_shared:
                counts = counts or [0] * len(self._strides)
                counts[one.group] += 1
        return counts

    def num_unshared(self, sequence: Sequence, most: int) -> int:
        """Return how many of the next ``most`` positions come before a block that another sequence shares."""
        start = sequence.num_scheduled
        if not self._enters_block(sequence, start + most):
            return most
        shared = [one.run * self._size for one in self._overwritten(sequence, start + most) if one.is_shared]
        return min((max(position, start) - start for position in shared), default=most)

    def replace(self, sequence: Sequence, end: int) -> list[BlockGrant]:
        """Replace the blocks that a row up to ``end`` would write over and that should stay.

        Return the grants. The caller has checked that there is room for `num_shared`. Other blocks stay only
        while there is room.
        """
        grants: list[BlockGrant] = []
        if not self._enters_block(sequence, end):
            return grants
        for one in sorted(self._overwritten(sequence, end), key=lambda one: not one.is_shared):
            pool, table = self._pools[one.group], sequence.tables[one.group]
            place = one.run % len(table)
            if not one.is_shared and not (one.is_wanted and pool.num_free):
                pool.unlabel(table[place])
                continue
            (block,) = pool.allocate(1)
            pool.free([table[place]])
            table[place] = block
            grants.append(BlockGrant(sequence.table_id, one.group, [block], b"", one.run))
        return grants

    def _retained(self, sequence: Sequence, end: int) -> int:
        """Return ``end`` if rings and states have what a row there needs, or a lower end that may have it."""
        for group in self._states:
            if not self._pools[group].has(sequence.tags[end // self._size]):
                return end - self._unit
        for group in self._rings:
            for run in range(end // self._size - 1, self._first(group, end) - 1, -1):
                if not self._pools[group].has(sequence.tags[run + 1]):
                    return run * self._size // self._unit * self._unit
        return end

    def _first(self, group: int, end: int) -> int:
        """Return the number of the first block that a ring or a state needs for a prefix that ends here."""
        if group not in self._rings:
            return end // self._size - 1
        return max(0, end - self._rings[group][1] + 1) // self._size

    def _begin(self, sequence: Sequence, hit: Hit, group: int) -> BlockGrant:
        blocks, first, stride = list(hit.blocks[group]), hit.first[group], self._strides[group]
        tags = sequence.tags[(first + 1) * stride : hit.num_tokens // self._size + 1 : stride]
        if group in self._rings:
            count = min(self._rings[group][0], hit.num_tokens // self._size)
            blocks += self._pools[group].allocate(count - len(blocks))
        turn = first % len(blocks)
        sequence.tables.append(blocks[len(blocks) - turn :] + blocks[: len(blocks) - turn])
        return BlockGrant(
            sequence.table_id, group, blocks, b"".join(tags), -1 if group in self._full else first
        )

    def _label_states(self, sequence: Sequence, end: int) -> None:
        tag = sequence.tags[end // self._size]
        pools = [self._pools[group] for group in self._states]
        if sequence.passing is not None:
            # Of the states between marks, only the last one stays.
            for pool in pools:
                pool.drop(sequence.passing)
        blocks = [sequence.tables[group][0] for group in self._states]
        # A list, because every pool gets the label.
        labelled = [pool.label(block, tag) for pool, block in zip(pools, blocks, strict=True)]
        is_mark = end in sequence.marks
        if is_mark:
            # Another sequence may have this label, and drop it as it passes.
            for pool in pools:
                pool.mark(tag)
        sequence.passing = tag if all(labelled) and not is_mark else None

    def _enters_block(self, sequence: Sequence, end: int) -> bool:
        """Return whether a row up to ``end`` may write over a full block.

        Most rows stay within a block, and a ring is written over from the start of one.
        """
        if not self._replaces or not sequence.tables:
            return False
        return bool(self._states) or -(-sequence.num_scheduled // self._size) != -(-end // self._size)

    def _overwritten(self, sequence: Sequence, end: int) -> Iterator[_Overwrite]:
        """Yield the full blocks that the next row, up to ``end``, is the first to write over."""
        for group in self._states:
            pool, block = self._pools[group], sequence.tables[group][0]
            if pool.is_labelled(block) or pool.num_owners(block) > 1:
                yield _Overwrite(group, 0, pool.num_owners(block) > 1, is_wanted=True)
        for group, (ring, window) in self._rings.items():
            pool, table = self._pools[group], sequence.tables[group]
            first = max(ring, -(-sequence.num_scheduled // self._size))
            for run in range(first, -(-end // self._size)):
                # A row that completes the ring may be the first to go round, too.
                block = table[run % ring]
                if pool.is_labelled(block) or pool.num_owners(block) > 1:
                    is_wanted = self._is_before_mark(sequence.marks, run - ring, window)
                    yield _Overwrite(group, run, pool.num_owners(block) > 1, is_wanted)

    def _is_before_mark(self, marks: frozenset[int], run: int, window: int) -> bool:
        size = self._size
        return any(max(0, mark - window + 1) // size - _SPARE_BLOCKS <= run < mark // size for mark in marks)
