"""A step between what the host says of it and what a device does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from convoy.model.backends.cuda.batch import HostBatch
from convoy.model.backends.cuda.kernels.attention import Ints
from convoy.wire.messages.control import Step


@dataclass(frozen=True)
class CheckedStep:
    """A step that was applied: its rows as kernels take them, None without any; and what goes in."""

    step: Step
    host: HostBatch | None
    hidden: torch.Tensor | None
    ids: torch.Tensor | None

    @property
    def told(self) -> Ints | None:
        """The token ids as kernels take them."""
        return None if self.ids is None else self.ids.numpy().astype(np.int32)
