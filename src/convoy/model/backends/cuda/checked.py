"""Hold a step that passed the host's checks and awaits the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from convoy.model.backends.cuda.batch import HostBatch
from convoy.model.backends.cuda.kernels.attention import Ints
from convoy.wire.messages.control import Step


@dataclass(frozen=True)
class CheckedStep:
    """Hold an applied step, its rows in kernel form (None for a step without rows), and its inputs."""

    step: Step
    host: HostBatch | None
    hidden: torch.Tensor | None
    ids: torch.Tensor | None

    @property
    def told(self) -> Ints | None:
        """Return the token ids as the kernels take them: int32, or None without token ids."""
        return None if self.ids is None else self.ids.numpy().astype(np.int32)
