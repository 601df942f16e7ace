"""An executor without a model: the logits of a position depend on every token before it, so a lost, doubled
or misplaced token shows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from convoy.engine.run.executor import Kv, StepResult
from convoy.errors import ConvoyError, StageLost
from convoy.model.sampling.output_rows import SampleJob, SampleResult, sample_all, with_states
from convoy.transport.link.link import Link, Received
from convoy.wire.messages.control import FED, Step

VOCAB = 64
# No test has so many steps: an engine that preempts for ever would take all memory here.
_MAX_STEPS = 100_000


def next_token(tokens: list[int]) -> int:
    """Return the token that the fake model gives after these."""
    state = 17
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
    return 3 + state % (VOCAB - 3)


class FakeExecutor:
    """Keep tokens by block and offset, as a stage keeps K/V, so that a wrongly shared block shows.

    ``fail_at`` makes that step's `collect` raise. ``rival`` is (position, distance): at that position
    another token is that near to the best one. With ``feeds`` it takes its own samples; ``misfeeds`` tells
    for each of them whether the stage has another token than the host.
    """

    def __init__(
        self, depth: int = 1, fail_at: int | None = None, block_size: int = 4, *, feeds: bool = False
    ) -> None:
        self.depth = depth
        self.feeds = feeds
        self.misfeeds: Callable[[], bool] = lambda: False
        self._fed: dict[int, int] = {}
        self._block_size = block_size
        self.fail_at = fail_at
        self.rival: tuple[int, float] | None = None
        self.steps: list[Step] = []
        self.closed = False
        self._tables: dict[int, list[int]] = {}
        self._tokens: dict[tuple[int, int], int] = {}
        self.results: deque[StepResult | ConvoyError] = deque()

    @property
    def oldest(self) -> int | None:
        return self.steps[-len(self.results)].number if self.results else None

    @property
    def suspects(self) -> tuple[str, ...]:
        return ()

    def submit(self, step: Step, jobs: Sequence[SampleJob]) -> None:
        self.steps.append(step)
        assert len(self.steps) < _MAX_STEPS, "the engine runs in circles"
        for released in step.released:
            self._tables.pop(released, None)
            self._fed.pop(released, None)
        for grant in step.grants:
            self._tables.setdefault(grant.sequence, []).extend(grant.blocks)
        tokens = deque(np.frombuffer(step.tokens, dtype="<u4").tolist())
        logits = []
        for row in step.rows:
            table = self._tables[row.sequence]
            places = [(block, offset) for block in table for offset in range(self._block_size)]
            for place in places[row.start : row.start + row.num_tokens]:
                token = tokens.popleft()
                self._tokens[place] = self._fed[row.sequence] if token == FED else token
            for end in range(row.start + row.num_tokens - row.num_outputs, row.start + row.num_tokens):
                known = [self._tokens[place] for place in places[: end + 1]]
                logits.append(np.eye(VOCAB, dtype=np.float32)[next_token(known)] * 10)
                if self.rival is not None and self.rival[0] == end + 1:
                    logits[-1][0] = 10 - self.rival[1]
        if self.fail_at is not None and step.number >= self.fail_at:
            self.results.append(StageLost("the fake stage went away"))
        else:
            stacked = np.stack(logits) if logits else np.zeros((0, VOCAB), dtype=np.float32)
            # The final state of a row is its logits.
            outcomes = with_states(sample_all(stacked, jobs), jobs, lambda rows: stacked[rows])
            self.results.append(StepResult(step.number, self._feed(step, outcomes)))

    def _feed(self, step: Step, outcomes: tuple[SampleResult, ...]) -> tuple[SampleResult, ...]:
        """Keep the last sample of each sequence for a later step, and return the outcomes."""
        if not (self.feeds and step.rows):
            return outcomes
        outcomes = tuple(replace(one, feeds=not self.misfeeds()) for one in outcomes)
        end = 0
        for row in step.rows:
            end += row.num_outputs
            if row.num_outputs:
                one = outcomes[end - 1]
                self._fed[row.sequence] = (one.sampled.token_id + (not one.feeds)) % VOCAB
        return outcomes

    def collect(self) -> StepResult:
        result = self.results.popleft()
        if isinstance(result, ConvoyError):
            raise result
        return result

    def read_blocks(self, start: int, end: int, blocks: Sequence[int]) -> Kv:
        """Return the tokens themselves, as the K/V of one head of one number."""
        places = [(block, offset) for block in blocks for offset in range(self._block_size)]
        tokens = np.array([self._tokens[place] for place in places], dtype=np.float32)
        return np.tile(tokens[None, None, :, None, None], (end - start, 2, 1, 1, 1))

    def write_blocks(self, start: int, blocks: Sequence[int], tags: Sequence[bytes], kv: Kv) -> None:
        places = [(block, offset) for block in blocks for offset in range(self._block_size)]
        assert len(tags) == len(blocks)
        held = {block for table in self._tables.values() for block in table}
        assert not held.intersection(blocks), "a block that a sequence holds is written"
        for place, number in zip(places, kv[0, 0, :, 0, 0].tolist(), strict=True):
            self._tokens[place] = int(number)

    def deliver(self, link: Link, received: Received) -> None:
        raise AssertionError("no member sends anything to a fake")

    def lost(self, link: Link, error: ConvoyError) -> None:
        raise AssertionError("a fake has no links")

    def close(self) -> None:
        self.closed = True
