"""What ranks on devices give, looked at once it is here.

A kernel that waited in vain for a rank gives no numbers, and cannot raise. What is no number may have other
reasons too, so the devices are asked, which waits for them, only where something is none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from convoy.model.sampling.output_rows import SampleResult

_EVERY = 256  # numbers of a row: a sum that was not made leaves more than so many beside each other


class RankResult(Protocol):
    """As `model.backends.cuda.memory.pending.PendingResult`."""

    @property
    def tensor(self) -> torch.Tensor: ...

    def wait(self) -> torch.Tensor:
        """Once it is complete."""
        ...


class SampledStep(Protocol):
    """As `model.sampling.output_rows.SampleTask`."""

    def outcomes(self) -> tuple[SampleResult, ...]:
        """Once they are known."""
        ...


@dataclass(frozen=True, slots=True)
class WatchedResult:
    """Hidden states, [rows, width]. ``check`` raises where a rank did not come."""

    result: RankResult
    check: Callable[[], None]

    @property
    def tensor(self) -> torch.Tensor:
        return self.result.tensor

    def wait(self) -> torch.Tensor:
        """The result. What stays on a device is not looked at: whoever draws from it looks."""
        found = self.result.wait()
        if found.device.type == "cpu" and not bool(found[:, ::_EVERY].isfinite().all()):
            self.check()
        return found


@dataclass(frozen=True, slots=True)
class WatchedDraws:
    """Outcomes. ``check`` raises where a rank did not come."""

    drawing: SampledStep
    check: Callable[[], None]

    def outcomes(self) -> tuple[SampleResult, ...]:
        """One for each draw, in their order."""
        found = self.drawing.outcomes()
        if any(one.error is not None for one in found):
            self.check()
        return found
