"""Decides what each step runs: admission, block tables and row order, with integers alone.

Decodes come first, so that a long prefill never starves a running stream; prefill chunks fill what is left of
the token budget. A sequence has at most one row in a step and at most one sample in flight; chunks of its
prompt may follow each other without waiting. When blocks run out, the sequence admitted last is preempted and
recomputed later. A new sequence shares the blocks of the longest prefix that is still in the pool, and at
least its last token runs. Releasing blocks while a step that writes to them is in flight is safe: stages run
steps in order, and a release travels in a later step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from convoy.engine.blocks import BlockPool
from convoy.engine.prefix import PrefixTags
from convoy.engine.sequence import Sequence, SequenceState
from convoy.errors import QueueFull, RequestError
from convoy.wire.messages import BlockGrant, Row, Step


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What the plan granted: pool size, rows and tokens per step, waiting places, steps in flight.

    Without ``prefix_cache`` no sequence shares a block.
    """

    num_blocks: int
    block_size: int
    max_batch: int = 32
    max_step_tokens: int = 512
    prefill_chunk: int = 256
    max_waiting: int = 256
    micro_batches: int = 1
    prefix_cache: bool = True


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A step and, for each of its rows, the sequence it belongs to."""

    step: Step
    sequences: tuple[Sequence, ...]


class Scheduler:
    """Owns the waiting queue, the running list and the block pool.

    Not thread-safe: the engine holds a lock.
    """

    def __init__(self, limits: SchedulerLimits, tags: PrefixTags | None = None) -> None:
        self.limits = limits
        self._tags = tags or PrefixTags(limits.block_size)
        self.pool = BlockPool(limits.num_blocks, limits.block_size)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preempted = 0
        self.num_cached_tokens = 0  # positions that were shared and so did not run
        self._released: list[int] = []
        self._next_table_id = 0
        self._next_step = 0

    def add(self, sequences: list[Sequence]) -> None:
        """Queue one request's sequences, all or none. Raises `QueueFull`, `RequestError` if it never can."""
        if len(sequences) > self.limits.max_waiting:
            raise RequestError(
                f"n is {len(sequences)}, and at most {self.limits.max_waiting} answers may wait", param="n"
            )
        if len(self.waiting) + len(sequences) > self.limits.max_waiting:
            raise QueueFull(
                f"{len(self.waiting)} answers wait already, {len(sequences)} more were asked for, "
                f"and at most {self.limits.max_waiting} may",
                hint="try again later, or raise engine.max_waiting",
            )
        for sequence in sequences:
            sequence.tags = [self._tags.root(sequence.salt)]
        self.waiting.extend(sequences)

    def finish(self, sequence: Sequence) -> None:
        """Retire or abort: its blocks are free for the next step. A second call does nothing."""
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        sequence.state = SequenceState.FINISHED

    def schedule(self) -> Scheduled | None:
        """The next step, or None when nothing can run now. With no rows it only carries releases."""
        planned: dict[Sequence, int] = {}
        grants: list[BlockGrant] = []
        self._plan_decodes(planned, grants)
        self._plan_prefills(planned, grants)
        self._admit(planned, grants)
        if not planned and not self._released:
            return None
        return self._commit_plan(planned, grants)

    def probe(self) -> Scheduled:
        """A step without rows: it passes every stage and comes back."""
        return self._commit_plan({}, [])

    def collected(self, scheduled: Scheduled) -> None:
        """A step came back from the stages."""
        for sequence in scheduled.sequences:
            sequence.num_in_flight -= 1

    def check(self) -> None:
        """Every block has the owners it should have. While idle: every block is free."""
        self.pool.check(block for sequence in self.running for block in sequence.blocks)
        if not self.running:
            assert self.pool.num_free == self.pool.num_blocks, "idle, but blocks are owned"

    def _plan_decodes(self, planned: dict[Sequence, int], grants: list[BlockGrant]) -> None:
        # With several steps in flight, each takes its share of the streams, so that no stage waits for
        # another.
        max_rows = max(1, -(-len(self.running) // self.limits.micro_batches))
        for sequence in list(self.running):
            if len(planned) >= max_rows or self._budget(planned) == 0:
                return
            if sequence.num_pending == 1 and sequence.num_scheduled > 0:
                self._plan_row(sequence, 1, planned, grants)

    def _plan_prefills(self, planned: dict[Sequence, int], grants: list[BlockGrant]) -> None:
        for sequence in list(self.running):
            if sequence.num_pending > 1 and sequence not in planned:
                self._plan_chunk(sequence, planned, grants)

    def _admit(self, planned: dict[Sequence, int], grants: list[BlockGrant]) -> None:
        while self.waiting and len(self.running) < self.limits.max_batch and self._budget(planned) > 0:
            sequence = self.waiting[0]
            # Preempted while its sample was in flight: that token belongs to what must be recomputed.
            if sequence.num_in_flight:
                return
            shared = self._find_prefix(sequence)
            needed = self.pool.blocks_for(len(sequence.tokens) + 1) - len(shared)
            if needed > self.pool.num_free - self.pool.num_unowned(shared):
                return
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.state = SequenceState.RUNNING
            sequence.table_id = self._next_table_id
            self._next_table_id += 1
            self._share(sequence, shared, grants)
            self._plan_chunk(sequence, planned, grants)

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks of known prefix; the last token is never in one, because something has to run."""
        if not self.limits.prefix_cache or sequence.all_outputs:
            return []
        num_blocks = (len(sequence.tokens) - 1) // self.limits.block_size
        self._tags.extend(sequence.tags, sequence.tokens, num_blocks)
        return self.pool.find(sequence.tags[1 : num_blocks + 1])

    def _share(self, sequence: Sequence, blocks: list[int], grants: list[BlockGrant]) -> None:
        num_tokens = len(blocks) * self.limits.block_size
        if sequence.num_cached is None:
            sequence.num_cached = num_tokens
        if not blocks:
            return
        self.pool.share(blocks)
        self.num_cached_tokens += num_tokens
        sequence.blocks.extend(blocks)
        sequence.num_scheduled = num_tokens
        shared = sequence.tags[1 : len(blocks) + 1]
        grants.append(BlockGrant(sequence.table_id, 0, list(blocks), b"".join(shared)))

    def _plan_chunk(self, sequence: Sequence, planned: dict[Sequence, int], grants: list[BlockGrant]) -> None:
        num_tokens = min(sequence.num_pending, self.limits.prefill_chunk, self._budget(planned))
        if num_tokens > 0:
            self._plan_row(sequence, num_tokens, planned, grants)

    def _plan_row(
        self, sequence: Sequence, num_tokens: int, planned: dict[Sequence, int], grants: list[BlockGrant]
    ) -> None:
        if sequence.state is not SequenceState.RUNNING:  # preempted a moment ago, for another row
            return
        needed = self.pool.blocks_for(sequence.num_scheduled + num_tokens) - len(sequence.blocks)
        while needed > self.pool.num_free:
            victim = next((s for s in reversed(self.running) if s not in planned), sequence)
            self._preempt(victim)
            if victim is sequence:
                return
        if needed > 0:
            blocks = self.pool.allocate(needed)
            sequence.blocks.extend(blocks)
            grants.append(BlockGrant(sequence.table_id, 0, blocks))
        planned[sequence] = num_tokens

    def _budget(self, planned: dict[Sequence, int]) -> int:
        return self.limits.max_step_tokens - sum(planned.values())

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preempted += 1
        self.running.remove(sequence)
        self._release(sequence)
        sequence.state = SequenceState.WAITING
        sequence.num_scheduled = 0
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.free(sequence.blocks)
        sequence.blocks.clear()
        self._released.append(sequence.table_id)

    def _commit_plan(self, planned: dict[Sequence, int], grants: list[BlockGrant]) -> Scheduled:
        rows = []
        tokens: list[int] = []
        for sequence, num_tokens in planned.items():
            start = sequence.num_scheduled
            end = start + num_tokens
            last = end == len(sequence.tokens)
            num_outputs = num_tokens if sequence.all_outputs and start < sequence.num_prompt else int(last)
            rows.append(self._tagged_row(sequence, start, end, num_outputs))
            tokens.extend(sequence.tokens[start:end])
            sequence.num_scheduled = end
            sequence.num_in_flight += 1
        step = Step(self._next_step, self._released, grants, rows, np.array(tokens, dtype="<u4").tobytes())
        self._released = []
        self._next_step += 1
        return Scheduled(step, tuple(planned))

    def _tagged_row(self, sequence: Sequence, start: int, end: int, num_outputs: int) -> Row:
        """Also makes the blocks that the row fills findable: for later steps, which run after this one."""
        tag = self._tags.at(sequence.tags, sequence.tokens, start)
        tags = self._tags.of_row(sequence.tags, sequence.tokens, start, end, num_outputs)
        if self.limits.prefix_cache:
            size = self.limits.block_size
            for index in range(start // size, end // size):
                self.pool.label(sequence.blocks[index], sequence.tags[index + 1])
        return Row(sequence.table_id, start, end - start, num_outputs, tag, tags)
