"""How a stage on a device computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from convoy.model.device import CUDA_BITS, CUDA_KERNEL, CUDA_KERNELS

KERNEL = CUDA_KERNEL
# to look for mistakes: no rounding to bfloat16, and the library's layers for every family
CHECK_KERNEL = "plain-f32"
DTYPES = dict.fromkeys(CUDA_KERNELS, torch.bfloat16) | {CHECK_KERNEL: torch.float32}


@dataclass(frozen=True)
class DeviceOptions:
    """What `model.backends.host.stage.StageOptions` says, of a device."""

    device: torch.device
    kernel: str
    block_size: int  # tokens
    require_tags: bool
    captured: bool = True
    num_threads: None = None

    @property
    def dtype(self) -> torch.dtype:
        """In which it computes."""
        return DTYPES[self.kernel]

    @property
    def bits(self) -> int:
        """Of a rounded weight; 0 where they are not rounded."""
        return CUDA_BITS.get(self.kernel, 0)
