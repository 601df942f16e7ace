"""The whole model as one stage in this process: the oracle that every split is compared with."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from convoy.engine.executor import Kv, StepResult
from convoy.engine.own_stage import own_stage
from convoy.model.draw import Draw, draw_all
from convoy.model.stage import Stage
from convoy.model.tensors import tokens_from_bytes
from convoy.wire.messages import Step


class LocalExecutor:
    """A stage that owns the embedding, every layer and the output; a step runs when it is submitted."""

    depth = 1

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._results: deque[StepResult] = deque()

    def submit(self, step: Step, draws: Sequence[Draw]) -> None:
        with own_stage(step.number):
            hidden = self._stage.run(step, hidden=None, tokens=tokens_from_bytes(step.tokens))
            logits = self._stage.output(self._stage.select(step, hidden))
            outcomes = draw_all(logits.numpy().astype(np.float32, copy=False), draws)
        self._results.append(StepResult(step.number, outcomes))

    def collect(self) -> StepResult:
        return self._results.popleft()

    def read_blocks(self, start: int, end: int, blocks: Sequence[int]) -> Kv:
        found: Kv = self._stage.read_blocks(start, end, blocks).numpy()
        return found

    def write_blocks(self, start: int, blocks: Sequence[int], tags: Sequence[bytes], kv: Kv) -> None:
        self._stage.write_blocks(start, blocks, tags, torch.from_numpy(kv))

    def close(self) -> None:
        """Nothing waits elsewhere, and the engine's thread may still be collecting."""
