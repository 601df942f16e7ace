"""Account for the K/V memory of a stage: block tables, which hold integers only; pools hold the numbers.

A block is ``block_size`` consecutive positions of one sequence, over all owned layers of one cache group. The
head decides which blocks a sequence has. A stage checks that a step makes sense before it changes anything.
By the head's prefix tags it also checks that the K/V under a row is that of the row's own prefix.

A table of a group with a window is a ring: run ``i`` of positions lies in ``blocks[i % len(blocks)]``. A
sequence may therefore be longer than its table, as long as no row looks back on overwritten positions.

A full block keeps the tag of the prefix that ends with it, also when no table holds it any more. So another
sequence may begin behind that prefix: with all blocks of a group that keeps every position, with those of the
last window of a ring, and with a copy of a recurrent state. Before a row would write over such a block, the
head replaces it in the table by another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from convoy.errors import StepError
from convoy.wire.messages.control import OPEN_TAG, PREFIX_TAG_BYTES, BlockGrant, Row, Step

# the number of a cache group, and of a block in it
_Block = tuple[int, int]
# the end of a shared prefix, and its tag
_End = tuple[int, bytes]


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
    after a rewind. ``ends`` holds the tags at 0 and at the ends of the full blocks, empty where they are not
    known; ``last`` holds those at other positions of the last row. Both are empty where rows are not tagged.
    ``lost`` has, for a ring that does not hold its first blocks, the first position that it does hold.
    """

    blocks: list[list[int]]
    length: int = 0
    ends: list[bytes] = field(default_factory=list)
    last: dict[int, bytes] = field(default_factory=dict)
    written: int = 0
    lost: dict[int, int] = field(default_factory=dict)

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
    # (group, from, to): the blocks with states that are copied before the rows run, in order
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    # for each new sequence with a shared prefix, its end in each group
    adopted: dict[int, dict[int, _End]] = field(default_factory=dict)
    # whether the tables have the changes already
    is_applied: bool = False


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
        # blocks are carried only if one full group exists: with several groups, or a ring, no single block
        # holds all that a sequence builds on
        self._one_full = len(self._groups) == 1 and self._groups[0].is_full
        self._all_full = all(group.is_full for group in self._groups)
        self._block_size = block_size
        self._max_context = max_context
        # positions of a block; all that there are for one that holds a state
        self._written_spans = [
            max_context + 1 if group.recurrent else block_size * group.stride for group in groups
        ]
        self._tables: dict[int, BlockTable] = {}
        # the number of tables that hold each block
        self._holders: Counter[_Block] = Counter()
        # the tags at the ends of full blocks, whether or not a table holds the block
        self._full: dict[_Block, bytes] = {}
        # steps that were applied before their run, by number
        self._prepared: dict[int, tuple[Step, StagedStep]] = {}

    def __len__(self) -> int:
        return len(self._tables)

    @property
    def num_held(self) -> int:
        """Return how many blocks the tables hold, each counted once."""
        return len(self._holders)

    def prepare(self, step: Step) -> StagedStep:
        """Check and apply a step before its run, which gets the same result from `stage`. Raises StepError.

        Only the next step may be prepared. Its run needs nothing of the tables that later steps change.
        """
        staged = self.stage(step)
        self.commit(staged)
        prepared = replace(staged, is_applied=True)
        self._prepared[step.number] = step, prepared
        return prepared

    def stage(self, step: Step) -> StagedStep:
        """Check releases, then grants, then rows, in that order, and change nothing. Raises StepError.

        A full block may be in several tables (shared prefixes), but only once in each. A shared block is
        never written to. A new table with a shared prefix shares it in every group.
        """
        known, prepared = self._prepared.pop(step.number, (None, None))
        if prepared is not None and known is step:
            return prepared
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
        for sequence, ends in staged.adopted.items():
            if len(ends) != len(self._groups) or len(set(ends.values())) > 1:
                raise StepError(f"sequence {sequence} does not share one prefix in every cache group")
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

        Raises nothing: `stage` has checked everything. A prepared step was applied already.
        """
        if staged.is_applied:
            return
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
        if table.tag_at(row.start, size) == OPEN_TAG:
            self._name(row, table)
        # every block that the row wrote to loses its tag; the full ones get the new tags below
        full = self._full
        for index in range(len(self._groups)):
            for block in self._written(index, row, table):
                full.pop((index, block), None)
        table.last = {}
        if not row.tag:
            return
        if row.tags.endswith(OPEN_TAG):
            # the row may be void: then the next one starts here again
            table.last = {row.start: row.tag, end: OPEN_TAG}
            table.ends[first + 1 :] = [OPEN_TAG] * num_ends
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
        for index, group in enumerate(self._groups):
            blocks, span = table.blocks[index], self._span(index)
            if not group.recurrent:
                for run in range(row.start // span, end // span):
                    self._full[index, blocks[run % len(blocks)]] = table.ends[(run + 1) * group.stride]
            elif end % size == 0:
                self._full[index, blocks[0]] = table.ends[end // size]

    def _name(self, row: Row, table: BlockTable) -> None:
        """Store a row's tag as that of the positions before it, which the row before left open."""
        if row.start % self._block_size or not row.tag:
            return
        run = row.start // self._block_size
        table.ends[run] = row.tag
        for index in range(len(self._groups)):
            self._full[index, table.blocks[index][run - 1]] = row.tag

    def _written(self, group: int, row: Row, table: BlockTable) -> Sequence[int]:
        """Return the blocks of a group that a checked row writes to."""
        blocks, span = table.blocks[group], self._written_spans[group]
        first, last = row.start // span, (row.start + row.num_tokens - 1) // span
        # the fast path: a decode
        if first == last:
            return (blocks[first % len(blocks)],)
        return [blocks[run % len(blocks)] for run in range(first, last + 1)]

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
        fresh = list(grant.blocks)
        if grant.first >= 0 and not grant.shared:
            self._replace(grant, table, staged)
        else:
            if not grant.shared and table.written > len(blocks) * self._span(grant.group) and grant.blocks:
                raise StepError(
                    f"sequence {grant.sequence} wrapped around its ring, which cannot grow any more"
                )
            fresh = grant.blocks[self._adopt(grant, table, staged) :]
            turn = max(0, grant.first) % max(1, len(grant.blocks))
            blocks.extend(grant.blocks[len(grant.blocks) - turn :])
            blocks.extend(grant.blocks[: len(grant.blocks) - turn])
        if len(set(blocks)) != len(blocks):
            raise StepError(f"sequence {grant.sequence} is granted a block that it has already")
        for block in fresh:
            if self._num_holders((grant.group, block), staged):
                raise StepError(f"a grant gives away block {block}, which a sequence holds")
            staged.fresh.add((grant.group, block))
        staged.holders.update((grant.group, block) for block in grant.blocks)

    def _replace(self, grant: BlockGrant, table: BlockTable, staged: StagedStep) -> None:
        """Put the grant's blocks in place of those of runs that the sequence needs no more.

        A block with a state is copied to the one that replaces it. Raises StepError if rows may still look
        back on such a run.
        """
        number, kind = grant.group, self._groups[grant.group]
        blocks, span = table.blocks[number], self._span(number)
        if kind.recurrent:
            if len(blocks) != 1 or len(grant.blocks) != 1:
                raise StepError(f"sequence {grant.sequence} has no one block to copy its state from")
            staged.copies.append((number, blocks[0], grant.blocks[0]))
        elif (
            kind.window is None
            or grant.first < len(blocks)
            or grant.first * span < table.written
            or not blocks
        ):
            raise StepError(f"sequence {grant.sequence} replaces a block that it may still need")
        for run, block in enumerate(grant.blocks, 0 if kind.recurrent else grant.first):
            place = run % len(blocks)
            staged.holders.subtract([(number, blocks[place])])
            blocks[place] = block
            if not kind.recurrent:
                table.lost[number] = max(table.lost.get(number, 0), (run - len(blocks) + 1) * span)

    def _copy(self, known: BlockTable | None) -> BlockTable:
        """Copy a table, because the step may still be refused."""
        if known is None:
            return BlockTable([[] for _ in self._groups])
        blocks = [list(blocks) for blocks in known.blocks]
        return BlockTable(blocks, known.length, list(known.ends), known.last, known.written, dict(known.lost))

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
        end = (max(0, grant.first) + num_shared) * self._span(grant.group)
        known = staged.adopted.setdefault(grant.sequence, {})
        if table.blocks[grant.group] or (table.length and not known):
            raise StepError(f"sequence {grant.sequence} has blocks, and only a new one may share a prefix")
        tags = [grant.shared[i * PREFIX_TAG_BYTES :][:PREFIX_TAG_BYTES] for i in range(num_shared)]
        for block, tag in zip(grant.blocks, tags, strict=False):
            found = (grant.group, block)
            if found in staged.fresh or self._full.get(found) != tag:
                raise StepError(f"sequence {grant.sequence} shares block {block}, which holds another prefix")
        self._check_adopted(grant, num_shared, end)
        known[grant.group] = (end, tags[-1])
        if grant.first > 0:
            table.lost[grant.group] = grant.first * self._block_size
        missing = end // self._block_size + 1 - len(table.ends)
        table.ends.extend([b""] * missing)
        stride = self._groups[grant.group].stride
        for run, tag in enumerate(tags, max(0, grant.first) + 1):
            table.ends[run * stride] = tag
        table.length = table.written = end
        return num_shared

    def _check_adopted(self, grant: BlockGrant, num_shared: int, end: int) -> None:
        """Raise StepError unless the shared blocks hold all that a row at their ``end`` looks back on."""
        group, first = self._groups[grant.group], max(0, grant.first)
        if end > self._max_context:
            raise StepError(f"a prefix ends at position {end}, beyond the context of {self._max_context}")
        if group.recurrent:
            enough = num_shared == 1 == len(grant.blocks)
        else:
            seen = 0 if group.window is None else max(0, end - group.window + 1)
            enough = first * self._span(grant.group) <= seen
            # a table that begins within the sequence is a ring, and holds all its runs in one turn
            enough = enough and (not first or group.window is not None)
        if not enough:
            raise StepError(f"sequence {grant.sequence} shares too little of a prefix in group {grant.group}")

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
            begin = table.lost.get(index, 0)
            if group.window is not None and max(0, row.start - group.window + 1) < begin:
                raise StepError(
                    f"a row of sequence {row.sequence} at {row.start} looks back behind {begin}, where its "
                    "ring begins"
                )

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
        if row.tags.endswith(OPEN_TAG) and not (row.start and row.num_tokens == 1 and self._all_full):
            raise StepError(f"a row of sequence {row.sequence} leaves its tags open, which it may not")
        known = table.tag_at(row.start, self._block_size)
        # nothing precedes position 0, so a sequence may start there with any tag
        begins = not row.start and not known and not (table.ends and not row.tag)
        untagged = not row.tag and not table.ends
        if known not in (row.tag, OPEN_TAG) and not begins and not untagged:
            raise StepError(
                f"a row of sequence {row.sequence} starts at {row.start} "
                "after another prefix than the known one"
            )

    def _check_unshared(self, row: Row, table: BlockTable, staged: StagedStep) -> None:
        for group in range(len(self._groups)):
            for block in self._written(group, row, table):
                if self._num_holders((group, block), staged) > 1:
                    raise StepError(
                        f"a row of sequence {row.sequence} writes to block {block}, which another shares"
                    )
