"""Decides what each step runs: admission, block tables and row order, with integers alone.

Decodes come first, so that a long prefill never starves a running stream. Prefill chunks fill the rest of the
token budget. A sequence has at most one row in a step and at most one sample in flight; chunks of its prompt
may follow each other without waiting. When blocks run out, the sequence admitted last is preempted and
recomputed later. A new sequence shares the blocks of the longest prefix that is still in the pool, and at
least its last token runs.

A decode may carry drafts, guesses of the tokens that come next. Drafts are outputs too, and `keep` is told
how many of them stand.

Releasing blocks while a step that writes to them is in flight is safe: stages run steps in order, and a
release travels in a later step.

Chunks get shorter as the number of keys that they look back on grows, so that all steps of a prefill take
about the same time. A prompt that runs alone is cut so that no stage waits for all of it. On devices, chunks
beside decodes are no longer than the measured rate allows, because every stream waits for them. While any
sequence decodes, no more steps are in flight than keep the stages busy, because a token waits for all steps
ahead of it.

Stages that take their own samples are fed: while a step is in flight, another one follows with the same
streams, and names no token where only the stages know it. The host thus works while the stages compute. With
several micro-batches, each of them is followed by a step of its own, so up to twice as many are in flight. If
the sequence has ended meanwhile, the row is dropped. If it ran on another token than the host got, it is
void, and its position runs again.

A sequence with nothing to run (a session between two calls) idles: it keeps its blocks until another sequence
needs them, and takes no place in the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from convoy.config.table import HOST_CHUNK
from convoy.engine.kv.limits import GroupLimits, SchedulerLimits
from convoy.engine.kv.pools import BlockPools
from convoy.engine.kv.prefix import PrefixTags
from convoy.engine.kv.prefix_cache import PrefixCache
from convoy.engine.sequence import Drafter, Sequence, SequenceState
from convoy.errors import QueueFull, RequestError
from convoy.plan.cost import TILE
from convoy.wire.messages.control import FED, BlockGrant, Row, Step


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Hold a step and, for each of its rows, the row's sequence and the drafts at its end."""

    step: Step
    sequences: tuple[Sequence, ...]
    drafts: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class StepBuilder:
    """Collect the rows and block grants of the next step.

    ``rows`` maps each sequence to its number of tokens. Its ``drafts`` are included and are the last of the
    row.
    """

    max_tokens: int
    rows: dict[Sequence, int] = field(default_factory=dict)
    drafts: dict[Sequence, list[int]] = field(default_factory=dict)
    grants: list[BlockGrant] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, sequence: Sequence, num_tokens: int, drafts: SequenceOf[int]) -> None:
        """Add a sequence's only row in the step: ``num_tokens``, with the ``drafts`` at its end included."""
        self.rows[sequence] = num_tokens
        self.num_tokens += num_tokens
        if drafts:
            self.drafts[sequence] = list(drafts)

    def known_end(self, sequence: Sequence) -> int:
        """Return the position where the row's known tokens end and its drafts begin."""
        return sequence.num_scheduled + self.rows[sequence] - len(self.drafts.get(sequence, ()))

    def write(self, number: int, released: list[int], tags: PrefixTags) -> Scheduled:
        """Return the step; every row starts where its sequence stands now."""
        rows = []
        tokens: list[int] = []
        for sequence, num_tokens in self.rows.items():
            drafts = self.drafts.get(sequence, [])
            start, known = sequence.num_scheduled, self.known_end(sequence)
            # Only a row that reaches the end of the known tokens is sampled: once after them, and once after
            # each draft.
            num_outputs = (1 + len(drafts)) * int(known >= len(sequence.tokens))
            if sequence.all_outputs and start < sequence.num_prompt:
                # Prompt log-probabilities need an output at every position.
                num_outputs = num_tokens
            rows.append(_tagged_row(tags, sequence, num_tokens, num_outputs, drafts))
            tokens.extend(sequence.tokens[start:known])
            tokens.extend(drafts)
            if known > len(sequence.tokens):
                tokens.append(FED)
        encoded = np.array(tokens, dtype="<u4").tobytes()
        drafted = tuple([tuple(self.drafts.get(sequence, ())) for sequence in self.rows])
        return Scheduled(Step(number, released, self.grants, rows, encoded), tuple(self.rows), drafted)


def _tagged_row(
    tags: PrefixTags, sequence: Sequence, num_tokens: int, num_outputs: int, drafts: SequenceOf[int]
) -> Row:
    start, end = sequence.num_scheduled, sequence.num_scheduled + num_tokens
    if start == len(sequence.tokens):
        tag, after = tags.of_fed(sequence.tags, sequence.tokens)
        return Row(sequence.table_id, start, num_tokens, num_outputs, tag, after)
    # Drafts may turn out wrong, so tags of blocks that end in drafts go into a copy of the sequence's own
    # chain.
    chain = list(sequence.tags) if drafts else sequence.tags
    tokens = [*sequence.tokens, *drafts] if drafts else sequence.tokens
    tag, after = tags.of_row(chain, tokens, start, end, num_outputs)
    return Row(sequence.table_id, start, num_tokens, num_outputs, tag, after)


# A step waits for its samples if more than one of so many streams cannot be fed.
_UNFED_SHARE = 8


def _can_be_fed(sequence: Sequence) -> bool:
    """Return whether a row may follow the token that a step in flight samples; not behind the last one."""
    num_tokens = len(sequence.tokens)
    return (
        sequence.feeds
        and sequence.num_scheduled == num_tokens
        and sequence.num_in_flight == 1
        and num_tokens + 1 < min(sequence.num_prompt + sequence.max_tokens, sequence.wall)
    )


__all__ = ["Drafter", "GroupLimits", "Scheduled", "Scheduler", "SchedulerLimits"]


class Scheduler:
    """Own the waiting queue, the running list and the block pools.

    Not thread-safe: the engine holds a lock.
    """

    def __init__(
        self, limits: SchedulerLimits, tags: PrefixTags | None = None, drafter: Drafter | None = None
    ) -> None:
        self._tags = tags or PrefixTags(limits.block_size)
        self._drafter = drafter
        self._make_pools(limits)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        # The longest idle first.
        self.idle: list[Sequence] = []
        self.num_preempted = 0
        # Positions that were shared and so did not run.
        self.num_cached_tokens = 0
        # Tokens of first admissions: looked up in the prefix cache, and found there.
        self.num_queried_tokens = self.num_hit_tokens = 0
        # Guesses that ran, and the accepted ones.
        self.num_drafted = self.num_accepted = 0
        # Rows that began with a token which only the stages knew yet.
        self.num_fed = 0
        # Steps with rows.
        self._num_in_flight = 0
        # Counts the steps with rows that were ever planned.
        self._turn = 0
        # Whether the stages take their own samples.
        self.feeds = False
        # The most tokens of all chunks in a step with decodes, as measured; None for no such limit.
        self.chunk_beside_decodes: int | None = None
        # Each suspect's number of tokens when it was marked.
        self._suspects: dict[Sequence, int] = {}
        self._released: list[int] = []
        self._next_table_id = 0
        self.next_step = 0

    def add(self, sequences: list[Sequence]) -> None:
        """Queue one request's sequences, all or none.

        Raises `QueueFull` if the queue has no place for them now, and `RequestError` if they can never run.
        """
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
            most = max(len(sequence.tokens), sequence.num_prompt + sequence.max_tokens)
            if most > self.pools.max_tokens:
                raise RequestError(
                    f"a sequence may have {most} tokens, and all {self.pools.num_blocks} K/V blocks hold "
                    f"{self.pools.max_tokens}",
                    param="max_tokens",
                )
        for sequence in sequences:
            sequence.tags = [self._tags.root(sequence.salt)]
        self.waiting.extend(sequences)

    def finish(self, sequence: Sequence) -> None:
        """Retire or abort a sequence: its blocks are free for the next step. A second call does nothing."""
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence.state is SequenceState.IDLE:
            self.idle.remove(sequence)
            self._release(sequence)
        elif sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        if self._drafter is not None:
            self._drafter.forget(sequence)
        sequence.state = SequenceState.FINISHED

    def reset(self, limits: SchedulerLimits) -> None:
        """Restart on stages without K/V: running sequences wait again in their order, and pools are new.

        They wait ahead of all others. Step numbers and table ids continue. ``limits`` keeps the size of a
        block. Idle sequences that have tokens to run wait too; the other idle sequences are finished.
        """
        assert limits.block_size == self.limits.block_size, "tags are made for one size of block"
        again = [*self.running, *(s for s in self.idle if s.num_pending)]
        for sequence in (*self.running, *self.idle):
            sequence.tables = []
            sequence.state = SequenceState.WAITING if sequence in again else SequenceState.FINISHED
        self.waiting.extendleft(reversed(again))
        self.running.clear()
        self.idle.clear()
        for sequence in self.waiting:
            sequence.num_scheduled = sequence.num_in_flight = 0
            sequence.fed_step = -1
        self._num_in_flight = 0
        self._make_pools(limits)
        self._released = []

    def try_apart(self, suspects: Iterable[Sequence]) -> None:
        """Admit ``suspects`` one at a time, because no stage may be able to run one of them.

        The next one is admitted once those before it gained a token.
        """
        self._suspects = {sequence: len(sequence.tokens) for sequence in suspects}

    def schedule(self) -> Scheduled | None:
        """Return the next step, or None when nothing can run now.

        A step without rows only carries releases.
        """
        self._wake()
        num_streams = self._num_streams()
        plan = StepBuilder(max_tokens=self._max_step_tokens(num_streams))
        feeds = self._feeds_now()
        if self._num_in_flight < self._max_in_flight(num_streams, feeds=feeds):
            self._plan_decodes(plan, num_streams, feeds=feeds)
            self._plan_prefills(plan, max(self.limits.max_chunks, 1 + feeds))
            self._admit(plan)
        if not plan.rows and not self._released:
            return None
        return self._commit_plan(plan)

    def probe(self) -> Scheduled:
        """Return a step without rows: it passes every stage and comes back."""
        return self._commit_plan(StepBuilder(0))

    def collected(self, scheduled: Scheduled) -> None:
        """Count a step as back from the stages."""
        self._num_in_flight -= bool(scheduled.sequences)
        for sequence in scheduled.sequences:
            sequence.num_in_flight -= 1

    def rest(self, sequence: Sequence) -> None:
        """Idle a sequence that ran all its tokens and may get more; it keeps its blocks until another needs
        them.

        A sequence that was preempted meanwhile has no blocks, so it is finished.
        """
        if sequence.state is not SequenceState.RUNNING:
            self.finish(sequence)
            return
        self.running.remove(sequence)
        self.idle.append(sequence)
        sequence.state = SequenceState.IDLE

    def keep(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Accept the first ``num_accepted`` drafts of the row that was collected last as tokens.

        The sequence continues right after them. Later steps overwrite the K/V that stages computed beyond.
        """
        self.num_drafted += num_drafts
        self.num_accepted += num_accepted
        if self._drafter is not None:
            self._drafter.learn(sequence, num_drafts, num_accepted)
        if sequence.state is SequenceState.RUNNING and num_accepted:
            start = sequence.num_scheduled
            sequence.num_scheduled += num_accepted
            self._prefixes.label(sequence, start, sequence.num_scheduled)

    def refuse_fed(self, sequence: Sequence) -> None:
        """Run the last token of a sequence again: its row in flight was fed with another one."""
        sequence.void_step, sequence.fed_step = sequence.fed_step, -1
        if sequence.state is SequenceState.RUNNING:
            sequence.num_scheduled = len(sequence.tokens) - 1

    def tags_of(self, tokens: SequenceOf[int], salt: bytes, num_blocks: int) -> list[bytes]:
        """Return the tags at the ends of the first blocks of these tokens."""
        chain = [self._tags.root(salt)]
        self._tags.extend(chain, tokens, num_blocks)
        return chain[1:]

    def check_changed(self) -> None:
        """Assert that blocks changed since the last check have the right owners; cheap for few changes."""
        self.pools.check_changed(idle=not self.running and not self.idle)

    def check(self) -> None:
        """Assert that every block has the right owners; while idle, that every block is free."""
        owners = (*self.running, *self.idle)
        self.pools.check(owners, idle=not owners)

    def _make_pools(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.chunk_beside_decodes = None
        self.pools = BlockPools(limits.groups, limits.block_size)
        self._prefixes = PrefixCache(self.pools, limits, self._tags)
        self._can_rewind = all(group.ring is None and group.stride == 1 for group in limits.groups)

    def _wake(self) -> None:
        for sequence in [s for s in self.idle if s.num_pending]:
            if len(self.running) < self.limits.max_batch:
                self.idle.remove(sequence)
                self.running.append(sequence)
                sequence.state = SequenceState.RUNNING

    def _feeds_now(self) -> bool:
        """Return whether a step may follow another before the host knows the samples of that one."""
        # A guess needs the last token on the host.
        if not (self.feeds and self._can_rewind and self._drafter is None):
            return False
        # Those that cannot be fed run in every other step, so a few of them do not hold up the others.
        return _UNFED_SHARE * sum([not sequence.feeds for sequence in self.running]) <= len(self.running)

    def _plan_decodes(self, plan: StepBuilder, num_streams: int, *, feeds: bool) -> None:
        max_rows = self._max_rows(num_streams)
        # This is `num_pending == 1`, inlined: it runs for hundreds of sequences several times a step.
        decodes = [s for s in self.running if s.num_scheduled > 0 and len(s.tokens) == s.num_scheduled + 1]
        if feeds:
            decodes += self._fed_decodes(num_streams)
        for sequence in decodes:
            if len(plan.rows) >= max_rows or self._budget(plan) == 0:
                return
            # A row planned before this one may have preempted it.
            if sequence.state is SequenceState.RUNNING:
                self._plan_row(sequence, 1, plan, self._draft(sequence, plan, max_rows))

    def _fed_decodes(self, num_streams: int) -> list[Sequence]:
        """Return the sequences that a fed row may continue now, those that wait longest first.

        A step takes samples of a step as many turns ago as there are micro-batches, or of earlier ones.
        Otherwise it would wait for the step just ahead of it, and stages would wait with it.
        """
        newest = self._turn + 1 - min(self.limits.micro_batches, num_streams)
        found = [s for s in self.running if s.turn <= newest and _can_be_fed(s)]
        return found if self.limits.micro_batches == 1 else sorted(found, key=lambda one: one.turn)

    def _num_streams(self) -> int:
        """Return how many sequences decode, or are about to."""
        return sum([len(sequence.tokens) <= sequence.num_scheduled + 1 for sequence in self.running])

    def _max_rows(self, num_streams: int) -> int:
        # With several steps in flight, each takes its share of the streams, so that no stage waits for
        # another.
        return max(1, -(-num_streams // self.limits.micro_batches))

    def _max_in_flight(self, num_streams: int, *, feeds: bool) -> int:
        limits = self.limits
        # A fed step waits behind each micro-batch.
        num_decodes = limits.micro_batches * (1 + feeds)
        # A decoding stream waits for every step ahead of it. A lone prefill may fill a longer window.
        return num_decodes if num_streams else max(num_decodes, limits.max_chunks)

    def _draft(self, sequence: Sequence, plan: StepBuilder, max_rows: int) -> list[int]:
        """Return guesses for a decode; none may cost another sequence its place in the step or its blocks."""
        if self._drafter is None or sequence.num_in_flight or sequence.all_outputs:
            return []
        # Every other running sequence keeps one token of the budget and one free block.
        others = len(self.running) - 1
        most = min(
            self.limits.max_drafts // max_rows,
            self._budget(plan) - 1 - others,
            sequence.max_tokens - sequence.num_generated - 1,
            sequence.wall - len(sequence.tokens) - 1,
            self.pools.num_writable(sequence, others) - len(sequence.tokens),
        )
        most = self._prefixes.num_unshared(sequence, most + 1) - 1
        return self._drafter.propose(sequence, most)[:most] if most > 0 else []

    def _plan_prefills(self, plan: StepBuilder, max_chunks: int) -> None:
        for sequence in list(self.running):
            if (
                len(sequence.tokens) > sequence.num_scheduled + 1
                and sequence not in plan.rows
                and sequence.num_in_flight < max_chunks
            ):
                self._plan_chunk(sequence, plan)

    def _admit(self, plan: StepBuilder) -> None:
        while self.waiting and len(self.running) < self.limits.max_batch and self._budget(plan) > 0:
            sequence = self.waiting[0]
            # Suspects run one at a time, so that the next failure tells which one breaks the stages.
            if sequence in self._suspects and self._is_one_tried():
                return
            # A sequence was preempted while its sample was in flight: that token belongs to the
            # recomputation, so wait.
            if sequence.num_in_flight:
                return
            # Otherwise it would be admitted and preempted for ever, within this very call.
            assert len(sequence.tokens) <= self.pools.max_tokens, "a sequence outgrew the whole pool"
            hit = self._prefixes.find(sequence)
            # Plus one token to continue with, if the pool can hold it: a session may fill the pool to the
            # last place.
            needed = self.pools.needed(min(len(sequence.tokens) + 1, self.pools.max_tokens))
            while not self.pools.have_room(self._prefixes.missing(hit, needed), hit.blocks):
                if not self._drop_idle():
                    return
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.state = SequenceState.RUNNING
            sequence.fed_step = -1
            sequence.table_id = self._next_table_id
            self._next_table_id += 1
            self.num_cached_tokens += hit.num_tokens
            if sequence.num_cached is None and self._prefixes.may_share(sequence):
                self.num_queried_tokens += len(sequence.tokens)
                self.num_hit_tokens += hit.num_tokens
            plan.grants.extend(self._prefixes.share(sequence, hit))
            self._plan_chunk(sequence, plan)

    def _is_one_tried(self) -> bool:
        alive = (SequenceState.WAITING, SequenceState.RUNNING)
        self._suspects = {
            sequence: num_tokens
            for sequence, num_tokens in self._suspects.items()
            if len(sequence.tokens) == num_tokens and sequence.state in alive
        }
        return any(sequence.state is SequenceState.RUNNING for sequence in self._suspects)

    def _plan_chunk(self, sequence: Sequence, plan: StepBuilder) -> None:
        most = self.limits.prefill_chunk
        if self.limits.cost is not None:
            # A chunk far into a prompt attends to more keys, so it gets fewer tokens for the same time.
            most = self.limits.cost.level_chunk(sequence.num_scheduled, most)
        num_tokens = min(self._num_overlapping(sequence), most, self._budget(plan))
        num_tokens = self._prefixes.cut(sequence, num_tokens)
        if num_tokens > 0:
            self._plan_row(sequence, num_tokens, plan)

    def _num_overlapping(self, sequence: Sequence) -> int:
        """Return how many pending tokens the next chunk takes at most.

        That is all of them while other sequences run or wait. A prompt that runs alone is cut into chunks
        that keep every stage busy.
        """
        pending = sequence.num_pending
        if len(self.running) > 1 or self.waiting:
            return pending
        most = min(self.limits.micro_batches, self.limits.max_chunks)
        num_chunks = min(most - sequence.num_in_flight, pending // max(TILE, self.limits.least_chunk))
        return pending if num_chunks < 2 else pending // num_chunks // TILE * TILE

    def _plan_row(
        self, sequence: Sequence, num_tokens: int, plan: StepBuilder, drafts: SequenceOf[int] = ()
    ) -> None:
        # A row planned before this one may have preempted it.
        if sequence.state is not SequenceState.RUNNING:
            return
        num_tokens += len(drafts)
        end = sequence.num_scheduled + num_tokens
        missing = self.pools.missing(sequence, end)
        while not self._have_room(sequence, end, missing):
            if self._drop_idle():
                continue
            # The last admitted sequence loses the least work. One with a row in this step must keep its
            # blocks.
            victim = next((s for s in reversed(self.running) if s not in plan.rows), sequence)
            self.preempt(victim)
            if victim is sequence:
                return
        if missing:
            plan.grants.extend(self.pools.grow(sequence, missing))
        plan.grants.extend(self._prefixes.replace(sequence, end))
        plan.add(sequence, num_tokens, drafts)

    def _have_room(self, sequence: Sequence, end: int, missing: SequenceOf[int]) -> bool:
        """Return whether a row up to ``end`` finds blocks, also in place of those that others share."""
        shared = self._prefixes.num_shared(sequence, end)
        if missing and shared:
            missing = [one + other for one, other in zip(missing, shared, strict=True)]
        return not (missing or shared) or self.pools.have_room(missing or shared)

    def _budget(self, plan: StepBuilder) -> int:
        return plan.max_tokens - plan.num_tokens

    def _max_step_tokens(self, num_streams: int) -> int:
        most, chunk = self.limits.max_step_tokens, self.chunk_beside_decodes
        if chunk is None or not num_streams:
            return most
        return min(most, self._max_rows(num_streams) + max(HOST_CHUNK, chunk // TILE * TILE))

    def preempt(self, sequence: Sequence) -> None:
        """Take the blocks from a running sequence, and let it wait for others."""
        self.num_preempted += 1
        self.running.remove(sequence)
        self._release(sequence)
        sequence.state = SequenceState.WAITING
        # A fed step in flight stays known, so that it is void if it ran on another token.
        sequence.num_scheduled = 0
        self.waiting.appendleft(sequence)

    def _drop_idle(self) -> bool:
        """Finish the sequence that has idled longest and free its blocks; its owner knows its tokens."""
        victim = next((s for s in self.idle if not s.num_pending), None)
        if victim is None:
            return False
        self.num_preempted += 1
        self.finish(victim)
        return True

    def _release(self, sequence: Sequence) -> None:
        self.pools.release(sequence)
        self._released.append(sequence.table_id)

    def _commit_plan(self, plan: StepBuilder) -> Scheduled:
        scheduled = plan.write(self.next_step, self._released, self._tags)
        self._turn += bool(plan.rows)
        for sequence in plan.rows:
            sequence.turn = self._turn
            # Only known tokens count as run and become findable: drafts may be wrong, and `keep` adds the
            # accepted ones. A fed token is known once the row behind it is planned.
            known, num_tokens = plan.known_end(sequence), len(sequence.tokens)
            start = sequence.num_scheduled - (sequence.fed_step >= 0)
            self._prefixes.label(sequence, start, min(known, num_tokens))
            sequence.num_scheduled = known
            sequence.fed_step = self.next_step if known > num_tokens else -1
            sequence.num_in_flight += 1
            self.num_fed += sequence.fed_step >= 0
        self._released = []
        self.next_step += 1
        self._num_in_flight += bool(plan.rows)
        return scheduled
