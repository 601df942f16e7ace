"""Account for the K/V memory of a stage: block tables, which hold integers only; pools hold the numbers.

A block is ``block_size`` consecutive positions of one sequence, over all owned layers of one cache group. The
head decides which blocks a sequence has. A stage checks that a step makes sense before it changes anything.
By the head's prefix tags it also checks that the K/V under a row is that of the row's own prefix.

A table of a group with a window is a ring: run ``i`` of positions lies in ``blocks[i % len(blocks)]``. A
sequence may therefore be longer than its table, as long as no row looks back on overwritten positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from convoy.errors import StepError
from convoy.wire.messages.control import PREFIX_TAG_BYTES, BlockGrant, Row, Step

# the number of a cache group, and of a block in it
_Block = tuple[int, int]


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """Describe the blocks of one cache group, and the positions of a sequence that its layers need."""

    num_blocks: int
    # positions that a token attends to, its own included; None means all
    window: int | None = None
    # True if a block holds a sequence's whole state, which a row can only extend
    recurrent: bool = False
    # number of positions that share one place in a block
    stride: int = 1

    @property
    def is_full(self) -> bool:
        return self.window is None and not self.recurrent and self.stride == 1


@dataclass(slots=True)
class BlockTable:
    """Hold a sequence's blocks, one list per cache group, and how many of its positions hold K/V.

    ``written`` is the end of the furthest row. Positions that this row overwrote in a ring stay lost, also
    after a rewind. ``ends`` holds the tags at 0 and at the ends of the full blocks; ``last`` holds those at
    other positions of the last row. Both are empty where rows are not tagged.
    """

    blocks: list[list[int]]
    length: int = 0
    ends: list[bytes] = field(default_factory=list)
    last: dict[int, bytes] = field(default_factory=dict)
    written: int = 0

    def tag_at(self, position: int, block_size: int) -> bytes | None:
        """Return the tag of the prefix before ``position``, or None if it is not known."""
        index, offset = divmod(position, block_size)
        return self.ends[index] if not offset and index < len(self.ends) else self.last.get(position)


@dataclass(frozen=True, slots=True)
class StagedStep:
    """Hold a checked step: the changes that `BlockTables.commit` will make, and each row with its table."""

    tables: dict[int, BlockTable | None]
    rows: list[tuple[Row, BlockTable]]
    # by how much the step changes the number of tables that hold each block
    holders: Counter[_Block]
    # blocks granted without a shared prefix; new K/V will overwrite them
    fresh: set[_Block]


class BlockTables:
    """Hold the tables of all live sequences of a stage. Integers only, because this runs for every step."""

    def __init__(
        self,
        groups: Sequence[GroupBlocks],
        *,
        block_size: int,
        max_context: int,
        require_tags: bool = True,
    ) -> None:
        self._groups = tuple(groups)
        self._require_tags = require_tags
        # prefixes are shared only if one full group exists: with several groups, or a ring, no single block
        # holds all that a sequence builds on
        self._one_full = len(self._groups) == 1 and self._groups[0].is_full
        self._block_size = block_size
        self._max_context = max_context
        self._tables: dict[int, BlockTable] = {}
        # the number of tables that hold each block
        self._holders: Counter[_Block] = Counter()
        # the tags at the ends of full blocks, whether or not a table holds the block
        self._full: dict[_Block, bytes] = {}

    def __len__(self) -> int:
        return len(self._tables)

    @property
    def num_held(self) -> int:
        """Return how many blocks the tables hold, each counted once."""
        return len(self._holders)

    def stage(self, step: Step) -> StagedStep:
        """Check releases, then grants, then rows, in that order, and change nothing. Raises StepError.

        A full block may be in several tables (shared prefixes), but only once in each. A shared block is
        never written to.
        """
        staged = StagedStep({}, [], Counter(), set())
        tables = staged.tables
        for sequence in step.released:
            table = tables.get(sequence, self._tables.get(sequence))
            if table is None:
                raise StepError(f"step {step.number} releases sequence {sequence}, which is not known here")
            tables[sequence] = None
            # count the changes apart: a later error of the step must leave `_holders` as it is
            staged.holders.subtract((g, block) for g, blocks in enumerate(table.blocks) for block in blocks)
        for grant in step.grants:
            self._grant(grant, staged)
        seen: set[int] = set()
        for row in step.rows:
            table = tables[row.sequence] if row.sequence in tables else self._tables.get(row.sequence)
            if table is None:
                raise StepError(f"step {step.number} runs sequence {row.sequence}, which is not known here")
            if row.sequence in seen:
                raise StepError(f"step {step.number} has sequence {row.sequence} in two rows")
            seen.add(row.sequence)
            self._check_row(row, table)
            self._check_tags(row, table)
            self._check_unshared(row, table, staged)
            staged.rows.append((row, table))
        return staged

    def commit(self, staged: StagedStep) -> None:
        """Apply a staged step. A row that starts before the known end overwrites and shortens its sequence.

        Raises nothing: `stage` has checked everything.
        """
        for sequence, table in staged.tables.items():
            if table is None:
                self._tables.pop(sequence, None)
            else:
                self._tables[sequence] = table
        for block, change in staged.holders.items():
            self._holders[block] += change
            if not self._holders[block]:
                del self._holders[block]
        # a fresh block loses its old tag now, so that no later grant shares it for its previous contents
        for block in staged.fresh:
            self._full.pop(block, None)
        for row, table in staged.rows:
            table.length = row.start + row.num_tokens
            table.written = max(table.written, table.length)
            self._remember(row, table)

    def check_carried(self, blocks: Sequence[int]) -> None:
        """Raise StepError for a block that does not exist, is named twice, or cannot be carried."""
        if not self._one_full:
            raise StepError(
                "K/V can be carried only if all layers keep all of it, and in this model they do not"
            )
        num_blocks = self._groups[0].num_blocks
        for block in blocks:
            if not 0 <= block < num_blocks:
                raise StepError(f"block {block} is named, but the pool has {num_blocks}")
        if len(set(blocks)) != len(blocks):
            raise StepError("a block is named twice")

    def fill(self, blocks: Sequence[int], tags: Sequence[bytes], *, whole: bool = True) -> None:
        """Mark blocks of the only cache group, in no table, as full, with ``tags`` at their ends.

        If not ``whole``, K/V of some layers is still missing, so the blocks hold no usable prefix yet. Raises
        StepError, and changes nothing then.
        """
        self.check_carried(blocks)
        if len(tags) != len(blocks) or any(len(tag) != PREFIX_TAG_BYTES for tag in tags):
            raise StepError(f"{len(blocks)} blocks come with {len(tags)} tags")
        for block in blocks:
            if self._holders[0, block]:
                raise StepError(f"block {block} cannot be filled: a sequence holds it")
        for block, tag in zip(blocks, tags, strict=True):
            self._full.pop((0, block), None)
            if whole:
                self._full[0, block] = tag

    def _remember(self, row: Row, table: BlockTable) -> None:
        """Store a row's tags, and remove the tags of the positions that it overwrote."""
        size, end = self._block_size, row.start + row.num_tokens
        first, num_ends = row.start // size, end // size - row.start // size
        if self._one_full:
            # every block that the row wrote to loses its tag; the full ones get the new tags below
            for block in table.blocks[0][first : -(-end // size)]:
                self._full.pop((0, block), None)
        table.last = {}
        if not row.tag:
            return
        # the fast path: a decode within a block, as most rows are
        if not num_ends and row.num_outputs <= 1 and table.ends:
            del table.ends[first + 1 :]
            table.last[end] = row.tags
            return
        tags = [row.tags[i : i + PREFIX_TAG_BYTES] for i in range(0, len(row.tags), PREFIX_TAG_BYTES)]
        del table.ends[first + 1 :]
        if not table.ends:
            table.ends.append(row.tag)
        table.ends.extend(tags[:num_ends])
        table.last = dict(enumerate(tags[num_ends:], end - (len(tags) - num_ends) + 1))
        if self._one_full:
            for index, tag in enumerate(tags[:num_ends], first):
                self._full[0, table.blocks[0][index]] = tag

    def _grant(self, grant: BlockGrant, staged: StagedStep) -> None:
        tables = staged.tables
        if not 0 <= grant.group < len(self._groups):
            raise StepError(f"a grant names cache group {grant.group}, but there are {len(self._groups)}")
        table = tables.get(grant.sequence)
        if table is None:
            known = None if grant.sequence in tables else self._tables.get(grant.sequence)
            table = tables[grant.sequence] = self._copy(known)
        num_blocks = self._groups[grant.group].num_blocks
        for block in grant.blocks:
            if not 0 <= block < num_blocks:
                raise StepError(f"a grant names block {block}, but the pool has {num_blocks}")
        blocks = table.blocks[grant.group]
        if table.written > len(blocks) * self._span(grant.group) and grant.blocks:
            raise StepError(f"sequence {grant.sequence} wrapped around its ring, which cannot grow any more")
        num_shared = self._adopt(grant, table, staged)
        blocks.extend(grant.blocks)
        if len(set(blocks)) != len(blocks):
            raise StepError(f"sequence {grant.sequence} is granted a block that it has already")
        for block in grant.blocks[num_shared:]:
            if self._num_holders((grant.group, block), staged):
                raise StepError(f"a grant gives away block {block}, which a sequence holds")
            staged.fresh.add((grant.group, block))
        staged.holders.update((grant.group, block) for block in grant.blocks)

    def _copy(self, known: BlockTable | None) -> BlockTable:
        """Copy a table, because the step may still be refused."""
        if known is None:
            return BlockTable([[] for _ in self._groups])
        blocks = [list(blocks) for blocks in known.blocks]
        return BlockTable(blocks, known.length, list(known.ends), known.last, known.written)

    def _adopt(self, grant: BlockGrant, table: BlockTable, staged: StagedStep) -> int:
        """Start a table with the full blocks that the grant claims by their tags; return their number.

        Raises StepError if a block does not hold the claimed prefix.
        """
        num_shared, odd = divmod(len(grant.shared), PREFIX_TAG_BYTES)
        if odd or num_shared > len(grant.blocks):
            raise StepError(
                f"a grant of {len(grant.blocks)} blocks has {len(grant.shared)} bytes of tags of shared ones"
            )
        if not num_shared:
            return 0
        if table.length or any(table.blocks):
            raise StepError(f"sequence {grant.sequence} has blocks, and only a new one may share a prefix")
        if not self._one_full:
            raise StepError(
                "a prefix can be shared only if all layers keep all of it, and in this model they do not"
            )
        tags = [grant.shared[i * PREFIX_TAG_BYTES :][:PREFIX_TAG_BYTES] for i in range(num_shared)]
        for block, tag in zip(grant.blocks, tags, strict=False):
            found = (grant.group, block)
            if found in staged.fresh or self._full.get(found) != tag:
                raise StepError(f"sequence {grant.sequence} shares block {block}, which holds another prefix")
        table.ends = [b"", *tags]
        table.length = table.written = num_shared * self._block_size
        return num_shared

    def _num_holders(self, block: _Block, staged: StagedStep) -> int:
        # `get` is cheaper than indexing: a Counter calls `__missing__` for an absent key
        return self._holders.get(block, 0) + staged.holders.get(block, 0)

    def _check_row(self, row: Row, table: BlockTable) -> None:
        end = row.start + row.num_tokens
        if row.num_tokens < 1:
            raise StepError(
                f"a row of sequence {row.sequence} has {row.num_tokens} tokens, expected at least 1"
            )
        if not 0 <= row.num_outputs <= row.num_tokens:
            raise StepError(f"a row of {row.num_tokens} tokens asks for {row.num_outputs} outputs")
        if not 0 <= row.start <= table.length:
            raise StepError(
                f"a row of sequence {row.sequence} starts at {row.start}, "
                f"but {table.length} positions are known"
            )
        if end > self._max_context:
            raise StepError(f"a row ends at position {end}, beyond the context of {self._max_context}")
        for index, (group, blocks) in enumerate(zip(self._groups, table.blocks, strict=True)):
            self._check_room(row, table, group, len(blocks) * self._span(index))

    def _span(self, group: int) -> int:
        """Return the number of positions in one block."""
        return self._block_size * self._groups[group].stride

    def _check_room(self, row: Row, table: BlockTable, group: GroupBlocks, capacity: int) -> None:
        """Raise StepError unless ``capacity`` positions hold those that the row writes and looks back on."""
        end = row.start + row.num_tokens
        if group.recurrent:
            if not capacity:
                raise StepError(f"sequence {row.sequence} has no block for its state")
            # a recurrent state cannot be rewound: it can only be extended at its end
            if row.start != table.written:
                raise StepError(
                    f"a row of sequence {row.sequence} starts at {row.start}, but its state covers "
                    f"{table.written} positions"
                )
        elif group.window is None and end > capacity:
            raise StepError(
                f"sequence {row.sequence} has blocks for {capacity} positions, its row ends at {end}"
            )
        elif group.window is not None:
            # the ring must hold everything from the first position looked back on to the furthest one written
            first = max(0, row.start - group.window + 1)
            if max(table.written, end) - first > capacity:
                raise StepError(
                    f"sequence {row.sequence} has a ring for {capacity} positions, its row looks back from "
                    f"{end} on {first}, and {table.written} were written"
                )

    def _check_tags(self, row: Row, table: BlockTable) -> None:
        if self._require_tags and not row.tag:
            raise StepError(f"a row of sequence {row.sequence} does not name the prefix before it")
        end = row.start + row.num_tokens
        num_ends = end // self._block_size - row.start // self._block_size
        expected = PREFIX_TAG_BYTES * (num_ends + max(1, row.num_outputs)) if row.tag else 0
        if len(row.tag) not in (0, PREFIX_TAG_BYTES) or len(row.tags) != expected:
            raise StepError(
                f"a row of sequence {row.sequence} has tags of {len(row.tag)} and {len(row.tags)} bytes, "
                f"expected {PREFIX_TAG_BYTES} and {expected}"
            )
        known = table.tag_at(row.start, self._block_size)
        # nothing precedes position 0, so a sequence may start there with any tag
        begins = not row.start and not known and not (table.ends and not row.tag)
        untagged = not row.tag and not table.ends
        if known != row.tag and not begins and not untagged:
            raise StepError(
                f"a row of sequence {row.sequence} starts at {row.start} "
                "after another prefix than the known one"
            )

    def _check_unshared(self, row: Row, table: BlockTable, staged: StagedStep) -> None:
        if not self._one_full:
            return
        size, end = self._block_size, row.start + row.num_tokens
        for block in table.blocks[0][row.start // size : -(-end // size)]:
            if self._num_holders((0, block), staged) > 1:
                raise StepError(
                    f"a row of sequence {row.sequence} writes to block {block}, which another shares"
                )
