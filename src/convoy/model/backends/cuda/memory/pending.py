"""Results on their way from a device, into pinned memory, which nobody has to wait for."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PendingResult:
    """A result that the device still works on, or copies. torch keeps pinned memory for the next one."""

    tensor: torch.Tensor
    done: torch.cuda.Event | None = None

    @classmethod
    def kept(cls, tensor: torch.Tensor) -> PendingResult:
        """It stays on the device, where work on it waits by itself."""
        return cls(tensor)

    @classmethod
    def copied(cls, tensor: torch.Tensor, stream: torch.cuda.Stream) -> PendingResult:
        """It comes to the host as it is, over ``stream``: what the device does next runs meanwhile."""
        if not tensor.numel():
            return cls(torch.empty(tensor.shape, dtype=tensor.dtype))
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)
        return cls(host, stream.record_event())

    def wait(self) -> torch.Tensor:
        """The result; on the host it is complete."""
        if self.done is not None:
            self.done.synchronize()
        return self.tensor
