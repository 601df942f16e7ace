"""Decode many sequences in several micro-batches over any executor: steps made by hand, without an engine.

`bench.bare` does the same with one sequence. Over the members' ring this measures devices, sealing and links
together. A scheduler and clients add to that, and are measured through an engine.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from convoy.bench.bare import BLOCK_SIZE, Steps
from convoy.bench.report.clock import Deadline
from convoy.engine.kv.prefix import PrefixTags
from convoy.model.sampling.output_rows import GREEDY
from convoy.wire.messages.control import BlockGrant, Row, Step

# Tokens of a step that reads prompts.
_CHUNK_TOKENS = 2048


@dataclass
class _Sequence:
    number: int
    chain: list[bytes]
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class RingRow:
    """Hold the result for a number of micro-batches. ``stages`` lists (member, device)."""

    through: str
    stages: list[tuple[str, str]]
    batch: int
    micro_batches: int
    context_tokens: int
    # From one result to the next.
    step_ms: float
    tokens_per_s: float


def room_tokens(context: int, num_windows: int, window_tokens: int) -> int:
    """Return the final tokens of a sequence, with room for one more block."""
    return context + (num_windows + 1) * window_tokens + BLOCK_SIZE


class RingDecode:
    """Decode micro-batches of equal size, all in flight at once."""

    def __init__(self, executor: Steps, vocab_size: int, deadline: Deadline) -> None:
        self._executor = executor
        self._deadline = deadline
        self._vocab_size = vocab_size
        self._tags = PrefixTags(BLOCK_SIZE)
        self._rng = random.Random(1)  # noqa: S311 - not a secret
        self._num_steps = self._num_sequences = 0
        self._batches: list[list[_Sequence]] = []

    def measure(
        self, batch: int, micro_batches: int, context: int, num_windows: int, window_tokens: int
    ) -> tuple[float, float]:
        """Return the tokens per second of all sequences, and milliseconds from step to step: medians of
        windows.
        """
        self._batches = [[self._sequence() for _ in range(batch)] for _ in range(micro_batches)]
        self._read(context, room_tokens(context, num_windows, window_tokens))
        self._window(window_tokens)
        seconds = statistics.median(self._window(window_tokens) for _ in range(num_windows))
        self._release()
        steps = (window_tokens - 1) * micro_batches
        return steps * batch / seconds, 1000 * seconds / steps

    def _sequence(self) -> _Sequence:
        self._num_sequences += 1
        return _Sequence(self._num_sequences - 1, [self._tags.root(b"")])

    def _read(self, context: int, max_tokens: int) -> None:
        """Run a random prompt for every sequence. Its K/V gets room for ``max_tokens``."""
        blocks, free = -(-max_tokens // BLOCK_SIZE), itertools.count()
        at_once = max(1, _CHUNK_TOKENS // context)
        for batch in self._batches:
            for first in range(0, len(batch), at_once):
                chosen = batch[first : first + at_once]
                grants = [
                    BlockGrant.append(s.number, 0, list(itertools.islice(free, blocks))) for s in chosen
                ]
                told = [[self._rng.randrange(self._vocab_size) for _ in range(context)] for _ in chosen]
                self._submit(chosen, told, grants)
                self._take(chosen)

    def _window(self, num_tokens: int) -> float:
        """Return the seconds for ``num_tokens`` of every sequence. The first token does not count."""
        waiting = deque(self._batches)
        for batch in self._batches:
            self._submit(batch, [[s.tokens.pop()] for s in batch], [])
        started_s = 0.0
        for count in range(num_tokens * len(self._batches)):
            batch = waiting.popleft()
            self._take(batch)
            # Start the clock when every micro-batch has given one token: the ring is full from then on.
            if count == len(self._batches) - 1:
                started_s = time.perf_counter()
            if count < (num_tokens - 1) * len(self._batches):
                self._submit(batch, [[s.tokens.pop()] for s in batch], [])
                waiting.append(batch)
        return time.perf_counter() - started_s

    def _release(self) -> None:
        released = [sequence.number for batch in self._batches for sequence in batch]
        self._executor.submit(Step(self._num_steps, released, [], [], b""), [])
        self._num_steps += 1
        self._executor.collect()

    def _submit(self, batch: list[_Sequence], told: list[list[int]], grants: list[BlockGrant]) -> None:
        self._deadline.left_s()
        rows = []
        for sequence, tokens in zip(batch, told, strict=True):
            start = len(sequence.tokens)
            sequence.tokens += tokens
            tags = self._tags.of_row(sequence.chain, sequence.tokens, start, len(sequence.tokens), 1)
            rows.append(Row(sequence.number, start, len(tokens), 1, *tags))
        encoded = np.array([t for tokens in told for t in tokens], dtype="<u4").tobytes()
        self._executor.submit(Step(self._num_steps, [], grants, rows, encoded), [GREEDY] * len(rows))
        self._num_steps += 1

    def _take(self, batch: list[_Sequence]) -> None:
        """Append each sequence's next token, which no step has run yet, to its tokens."""
        outcomes = self._executor.collect().outcomes
        for sequence, outcome in zip(batch, outcomes, strict=True):
            if outcome.error is not None:
                raise outcome.error
            sequence.tokens.append(outcome.sampled.token_id)
