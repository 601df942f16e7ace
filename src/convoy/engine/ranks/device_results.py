"""Results of device ranks, checked when they arrive.

A kernel that waited in vain for a rank returns no numbers and cannot raise. Values that are not finite may
have other reasons too, so the devices are asked only in that case: the question waits for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from convoy.model.sampling.output_rows import SampleResult
from convoy.model.stage import PendingHidden, PendingSamples

# Look at each 256th number of a row: a sum that failed leaves a longer run of values that are no numbers.
_EVERY = 256


class RankResult(PendingHidden, Protocol):
    """Describe a pending result, as `model.backends.cuda.memory.pending.PendingResult`."""

    @property
    def tensor(self) -> torch.Tensor:
        """Return the tensor, complete or not."""


@dataclass(frozen=True, slots=True)
class WatchedResult:
    """Hold hidden states, [rows, width]. ``check`` raises if a rank was missing."""

    result: RankResult
    check: Callable[[], None]

    @property
    def tensor(self) -> torch.Tensor:
        return self.result.tensor

    def wait(self) -> torch.Tensor:
        """Return the result. A tensor that stays on a device is not checked here but when it is sampled."""
        found = self.result.wait()
        if found.device.type == "cpu" and not bool(found[:, ::_EVERY].isfinite().all()):
            self.check()
        return found


@dataclass(frozen=True, slots=True)
class WatchedSamples:
    """Hold sampling results. ``check`` raises if a rank was missing."""

    samples: PendingSamples
    check: Callable[[], None]

    def outcomes(self) -> tuple[SampleResult, ...]:
        """Return one result for each sampling job, in their order."""
        found = self.samples.outcomes()
        if any(one.error is not None for one in found):
            self.check()
        return found
