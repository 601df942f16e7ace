"""K/V memory of a stage: block tables, which only count, and the pools, which hold the numbers.

A block is ``block_size`` consecutive positions of one sequence, over all owned layers of one cache group. The
head decides which blocks a sequence has; a stage checks that a step makes sense before it changes anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from convoy.errors import StepError
from convoy.wire.messages import BlockGrant, Row, Step


@dataclass(slots=True)
class BlockTable:
    """A sequence's blocks, one list per cache group, and how many of its positions hold K/V."""

    blocks: list[list[int]]
    length: int = 0


@dataclass(frozen=True, slots=True)
class StagedStep:
    """A checked step: what `BlockTables.commit` will change, and each row with its table."""

    tables: dict[int, BlockTable | None]
    rows: list[tuple[Row, BlockTable]]


class BlockTables:
    """The tables of all live sequences of a stage. Integers only: this runs for every step."""

    def __init__(self, *, num_groups: int, num_blocks: int, block_size: int, max_context: int) -> None:
        self.num_blocks = num_blocks
        self._num_groups = num_groups
        self._block_size = block_size
        self._max_context = max_context
        self._tables: dict[int, BlockTable] = {}

    def __len__(self) -> int:
        return len(self._tables)

    def stage(self, step: Step) -> StagedStep:
        """Check releases, then grants, then rows, in that order; nothing changes. Raises StepError.

        A block may stand in several tables (shared prefixes), but once in one table.
        """
        tables: dict[int, BlockTable | None] = {}
        for sequence in step.released:
            if tables.get(sequence, self._tables.get(sequence)) is None:
                raise StepError(f"step {step.number} releases sequence {sequence}, which is not known here")
            tables[sequence] = None
        for grant in step.grants:
            self._grant(grant, tables)
        seen: set[int] = set()
        rows = []
        for row in step.rows:
            table = tables[row.sequence] if row.sequence in tables else self._tables.get(row.sequence)
            if table is None:
                raise StepError(f"step {step.number} runs sequence {row.sequence}, which is not known here")
            if row.sequence in seen:
                raise StepError(f"step {step.number} has sequence {row.sequence} in two rows")
            seen.add(row.sequence)
            self._check_row(row, table)
            rows.append((row, table))
        return StagedStep(tables, rows)

    def commit(self, staged: StagedStep) -> None:
        """Make a staged step's changes. A row that starts before the known end overwrites and shortens."""
        for sequence, table in staged.tables.items():
            if table is None:
                self._tables.pop(sequence, None)
            else:
                self._tables[sequence] = table
        for row, table in staged.rows:
            table.length = row.start + row.num_tokens

    def _grant(self, grant: BlockGrant, tables: dict[int, BlockTable | None]) -> None:
        if not 0 <= grant.group < self._num_groups:
            raise StepError(f"a grant names cache group {grant.group}, but there are {self._num_groups}")
        table = tables.get(grant.sequence)
        if table is None:
            known = None if grant.sequence in tables else self._tables.get(grant.sequence)
            # a copy, because the step may yet be refused
            table = BlockTable(
                [list(blocks) for blocks in known.blocks] if known else [[] for _ in range(self._num_groups)],
                known.length if known else 0,
            )
            tables[grant.sequence] = table
        for block in grant.blocks:
            if not 0 <= block < self.num_blocks:
                raise StepError(f"a grant names block {block}, but the pool has {self.num_blocks}")
        blocks = table.blocks[grant.group]
        blocks.extend(grant.blocks)
        if len(set(blocks)) != len(blocks):
            raise StepError(f"sequence {grant.sequence} is granted a block that it has already")

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
        capacity = min(len(blocks) for blocks in table.blocks) * self._block_size
        if end > capacity:
            raise StepError(
                f"sequence {row.sequence} has blocks for {capacity} positions, its row ends at {end}"
            )
        if end > self._max_context:
            raise StepError(f"a row ends at position {end}, beyond the context of {self._max_context}")


class KvPool:
    """K and V of one layer: [2, num_blocks, kv_heads, block_size, head_dim], float32.

    One head of one block is one contiguous run, so a gather of blocks by (block, head) is copies of whole
    runs into the layout that batched matmuls need. Memory that was never written reads as zero.
    """

    def __init__(self, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int) -> None:
        self._runs = torch.zeros(2 * num_blocks * num_kv_heads, block_size * head_dim)
        self._rows = self._runs.view(-1, head_dim)
        self._head_dim = head_dim

    def write(self, rows: torch.Tensor, kv: torch.Tensor) -> None:
        """Put ``kv`` [N, head_dim] at ``rows`` [N] of [2 * num_blocks * kv_heads * block_size]."""
        # A masked key gets probability 0, and 0 * inf is NaN: what one broken sequence leaves in a block
        # must not reach the next owner of the block.
        self._rows.index_copy_(0, rows, torch.nan_to_num(kv))

    def gather(self, runs: torch.Tensor, run_rows: int) -> torch.Tensor:
        """The ``runs``, of [2 * num_blocks * kv_heads], joined: [.., run_rows, head_dim]."""
        return self._runs.index_select(0, runs).view(-1, run_rows, self._head_dim)
