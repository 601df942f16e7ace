"""Reuse pinned memory through which a step's inputs reach the device.

Memory of torch's own pinned allocator, filled by torch's own copy, took a step of 64 rows several
milliseconds. That is as long as the device takes for its layers (two H200, torch 2.11).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

_LEAST_BYTES = 1 << 12


@dataclass(frozen=True)
class StagingSlot:
    """Hold pinned bytes on the host. ``done`` completes once the device has read them."""

    memory: torch.Tensor  # uint8, pinned
    # A view of ``memory``.
    array: npt.NDArray[np.uint8]
    done: torch.cuda.Event


class Staging:
    """Hold the slots of one stage, as many as there are copies in flight. Not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: list[StagingSlot] = []
        # A stream of their own: hidden states are copied while earlier work still runs.
        self._uploads = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def take(self, num_bytes: int) -> StagingSlot:
        """Return a free slot with room for ``num_bytes``.

        The caller fills it, copies from it, and records ``done`` behind the copy.
        """
        for slot in self._slots:
            if len(slot.array) >= num_bytes and slot.done.query():  # type: ignore[no-untyped-call]
                return slot
        size = max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length())
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        slot = StagingSlot(memory, memory.numpy(), torch.cuda.Event())  # type: ignore[no-untyped-call]
        self._slots.append(slot)
        return slot

    def on_card(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` on the device, ready for the current stream. The calling thread does not wait."""
        if tensor.is_cuda or not tensor.numel():
            return tensor.to(self._device, non_blocking=True)
        slot, num_bytes = self.take(tensor.nbytes), tensor.nbytes
        # NumPy copies on this thread. Torch would spread so small a copy over all its threads.
        np.copyto(slot.array[:num_bytes], tensor.contiguous().view(-1).view(torch.uint8).numpy())
        pinned = slot.memory[:num_bytes].view(tensor.dtype).view(tensor.shape)
        with torch.cuda.stream(self._uploads):
            there = pinned.to(self._device, non_blocking=True)
            slot.done.record(self._uploads)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._uploads)
        there.record_stream(current)
        return there
