"""Hold results on their way from a device into pinned memory.

The submitting thread need not wait for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PendingResult:
    """Hold a result that the device still computes or copies. Torch reuses its pinned memory afterwards."""

    tensor: torch.Tensor
    done: torch.cuda.Event | None = None

    @classmethod
    def kept(cls, tensor: torch.Tensor) -> PendingResult:
        """Return a result that stays on the device, where later work is ordered behind it by the stream."""
        return cls(tensor)

    @classmethod
    def copied(cls, tensor: torch.Tensor, stream: torch.cuda.Stream) -> PendingResult:
        """Return a result that is copied to the host over ``stream``, while the device works on."""
        if not tensor.numel():
            return cls(torch.empty(tensor.shape, dtype=tensor.dtype))
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            host.copy_(tensor, non_blocking=True)
        # Without this torch could hand the memory out again before the copy on ``stream`` has read it.
        tensor.record_stream(stream)
        return cls(host, stream.record_event())

    def wait(self) -> torch.Tensor:
        """Return the result. On the host it is complete."""
        if self.done is not None:
            self.done.synchronize()
        return self.tensor
