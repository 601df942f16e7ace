"""Declare the interface between a stage and the model on its device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn

from convoy.model.backends.cuda.batch import DeviceBatch
from convoy.model.backends.cuda.kernels.sums import DeviceSums
from convoy.model.backends.cuda.memory.pools import LayerPool


class Model(Protocol):
    """Declare the stage's part of the model on its device: a `DeviceDecoder` or a `LibraryDecoder`."""

    @property
    def weight_bytes(self) -> int: ...

    @property
    def bytes_read(self) -> int: ...

    @property
    def layers(self) -> Mapping[int, nn.Module]: ...

    @property
    def owns_output(self) -> bool: ...

    @property
    def can_capture(self) -> bool: ...

    @property
    def takes_tokens(self) -> bool: ...

    def join(self, sums: DeviceSums) -> None: ...

    def embed(self, ids: torch.Tensor) -> torch.Tensor: ...

    def run(
        self,
        x: torch.Tensor,
        ids: torch.Tensor | None,
        batch: DeviceBatch,
        pools: Mapping[int, LayerPool],
    ) -> torch.Tensor: ...

    def final_state(self, x: torch.Tensor) -> torch.Tensor: ...

    def logits(self, x: torch.Tensor) -> torch.Tensor: ...
