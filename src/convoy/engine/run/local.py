"""The whole model as one stage in this process: the oracle that every split is compared with."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from convoy.engine.run.executor import Kv, StepResult
from convoy.engine.run.feeding import FedTokens, StepSamples, StepStarter
from convoy.engine.run.own_stage import own_stage
from convoy.errors import ConvoyError
from convoy.model.sampling.output_rows import SampleJob
from convoy.model.stage import Stage
from convoy.transport.link.link import Link, Received
from convoy.wire.messages.control import Step


class LocalExecutor:
    """Run a stage that owns the embedding, every layer and the output; a step starts when it is submitted.

    On the host, the step is complete then too. With ``depth``, each of several devices may have a step under
    way. Where the stage can be fed, the next step is submitted while one runs.
    """

    def __init__(self, stage: Stage, depth: int = 1) -> None:
        self._starter = StepStarter(stage)
        self.feeds = self._starter.on_device
        self.depth = max(depth, 2) if self.feeds else depth
        self._stage = stage
        self._running: deque[tuple[int, StepSamples]] = deque()

    @property
    def oldest(self) -> int | None:
        return self._running[0][0] if self._running else None

    @property
    def suspects(self) -> tuple[str, ...]:
        """Return nothing: no other member runs these steps."""
        return ()

    def submit(self, step: Step, jobs: Sequence[SampleJob]) -> None:
        samples = StepSamples.of(step)
        with own_stage(step.number):
            fed = FedTokens.of(step, (ahead for _, ahead in reversed(self._running)))
            hidden = self._starter.start(step, fed, selects=True).wait()
            samples.pending = self._stage.sample(hidden, jobs)
        self._running.append((step.number, samples))

    def collect(self) -> StepResult:
        number, samples = self._running.popleft()
        assert samples.pending is not None, "sampling starts with the step"
        with own_stage(number):
            return StepResult(number, samples.pending.outcomes())

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
