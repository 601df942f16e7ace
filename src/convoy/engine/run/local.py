"""The whole model as one stage in this process: the oracle that every split is compared with."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate

import torch

from convoy.engine.run.executor import Kv, StepResult
from convoy.engine.run.own_stage import own_stage
from convoy.errors import ConvoyError, StepError
from convoy.model.sampling.output_rows import SampleJob
from convoy.model.stage import FeedingStage, PendingHidden, PendingSamples, Stage
from convoy.model.tensors import tokens_from_bytes
from convoy.transport.link.link import Link, Received
from convoy.wire.messages.control import FED, Step


class LocalExecutor:
    """Run a stage that owns the embedding, every layer and the output; a step starts when it is submitted.

    On the host, the step is complete then too. With ``depth``, each of several devices may have a step under
    way. Where the stage can be fed, the next step is submitted while one runs.
    """

    def __init__(self, stage: Stage, depth: int = 1) -> None:
        self._feeder = stage if isinstance(stage, FeedingStage) and stage.feeds else None
        self.feeds = self._feeder is not None
        self.depth = max(depth, 2) if self.feeds else depth
        self._stage = stage
        self._running: deque[tuple[int, PendingSamples]] = deque()
        # The last step with rows: the place of each sequence's sample, and the samples.
        self._places: dict[int, int] = {}
        self._samples: PendingSamples | None = None

    @property
    def oldest(self) -> int | None:
        return self._running[0][0] if self._running else None

    @property
    def suspects(self) -> tuple[str, ...]:
        """Return nothing: no other member runs these steps."""
        return ()

    def submit(self, step: Step, jobs: Sequence[SampleJob]) -> None:
        with own_stage(step.number):
            samples = self._stage.sample(self._start(step).wait(), jobs)
            self._running.append((step.number, samples))
        if self.feeds and step.rows:
            ends = accumulate(row.num_outputs for row in step.rows)
            ended = zip(step.rows, ends, strict=True)
            self._places = {row.sequence: end - 1 for row, end in ended if row.num_outputs}
            self._samples = samples

    def _start(self, step: Step) -> PendingHidden:
        tokens = tokens_from_bytes(step.tokens)
        if self._feeder is None or self._samples is None or not (fed := tokens == FED).any():
            return self._stage.start(step, None, tokens, selects=True)
        ends = accumulate(row.num_tokens for row in step.rows)
        last = {end - 1: row.sequence for row, end in zip(step.rows, ends, strict=True)}
        for index in fed.nonzero().flatten().tolist():
            place = self._places.get(last.get(index, -1), -1)
            if place < 0:
                raise StepError(f"step {step.number} has a fed token that the step before did not sample")
            tokens[index] = -1 - place
        return self._feeder.start_fed(step, tokens, self._samples)

    def collect(self) -> StepResult:
        number, samples = self._running.popleft()
        with own_stage(number):
            return StepResult(number, samples.outcomes())

    def read_blocks(self, start: int, end: int, blocks: Sequence[int]) -> Kv:
        found: Kv = self._stage.read_blocks(start, end, blocks).numpy()
        return found

    def write_blocks(self, start: int, blocks: Sequence[int], tags: Sequence[bytes], kv: Kv) -> None:
        self._stage.write_blocks(start, blocks, tags, torch.from_numpy(kv))

    def deliver(self, link: Link, received: Received) -> None:
        """Drop it: no other member has a part in these steps."""

    def lost(self, link: Link, error: ConvoyError) -> None:
        """Do nothing, as no step waits for a link."""

    def close(self) -> None:
        """Do nothing: no other thread waits, and the engine's thread may still be collecting."""
