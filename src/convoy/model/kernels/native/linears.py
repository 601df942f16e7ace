"""Multiply few rows by compiled code, over the weights that are resident anyway.

In float32 the weights are oneDNN's own packed weights, and the bits are oneDNN's: one chain of products
for each output, in runs of a length that is measured here. With 8 bits sums are whole numbers, so any
order gives the same result.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Sequence

import torch

from convoy.model.kernels.native.library import F32Linear, I8Linear, native_library

# oneDNN multiplies more rows as fast: then products take the time, and not the reading of weights.
MAX_F32_ROWS = 18
_PANEL, _INPUTS = 64, 16
_RUNS = (1024, 512, 256, 384, 768, 2048)
_PROBE_ROWS = 5


class NativeF32:
    """Compute x W^T + b over oneDNN's packed weights, for up to `MAX_F32_ROWS` rows."""

    def __init__(
        self, packed: Sequence[torch.Tensor], runs: Sequence[int], bias: torch.Tensor | None
    ) -> None:
        library = native_library()
        assert library is not None, "nothing is compiled here"
        self._outputs, self._inputs = packed[0].shape[0], [part.shape[1] for part in packed]
        none = [0] * (2 - len(packed))
        # Kept alive: the struct below has only their addresses.
        self._held = (packed, bias)
        self.described = F32Linear(
            (ctypes.c_void_p * 2)(*[torch.ops.mkldnn.data_ptr(part) for part in packed], *none),
            (ctypes.c_int64 * 2)(*self._inputs, *none),
            (ctypes.c_int64 * 2)(*runs, *none),
            None if bias is None else bias.data_ptr(),
            self._outputs,
        )
        self._reference = ctypes.byref(self.described)
        self._run = library.convoy_f32_linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map float32 [rows, inputs] to [rows, outputs]. The numbers of a row must be contiguous."""
        num_rows = x.shape[0]
        y = torch.empty(num_rows, self._outputs)
        self._run(
            *(self._reference, x.data_ptr(), x.stride(0), y.data_ptr(), num_rows, torch.get_num_threads())
        )
        return y


def native_f32(packed: Sequence[torch.Tensor], bias: torch.Tensor | None) -> NativeF32 | None:
    """Return the compiled linear.

    Returns None where nothing is compiled, or where oneDNN uses another layout or order of sums.
    """
    if native_library() is None or not all(_is_in_panels(part) for part in packed):
        return None
    runs = [run_length(part.shape[1], min(part.shape[0], 2 * _PANEL)) for part in packed]
    return NativeF32(packed, runs, bias) if all(runs) else None


@functools.cache
def run_length(inputs: int, outputs: int) -> int:
    """Return how many products oneDNN adds one after the other, or 0 where no length gives its bits."""
    generator = torch.Generator().manual_seed(20)
    weight = torch.randn(outputs, inputs, generator=generator)
    x = torch.randn(_PROBE_ROWS, inputs, generator=generator)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 256)
    if not _is_in_panels(packed):
        return 0
    expected = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    runs = (inputs, *(run for run in _RUNS if run < inputs))
    return next((run for run in runs if torch.equal(expected, NativeF32([packed], [run], None)(x))), 0)


def _is_in_panels(packed: torch.Tensor) -> bool:
    """Return whether the packed memory has the size of panels.

    The contents are compared by `run_length`. The size must match first, so that compiled code stays
    inside.
    """
    outputs, inputs = packed.shape
    panels = -(-outputs // _PANEL) * _PANEL * -(-inputs // _INPUTS) * _INPUTS
    return int(torch.ops.mkldnn._nbytes(packed)) == 4 * panels


class NativeI8:
    """Multiply rows rounded to 8 bits by weights of 8 bits, with scales and bias, in one call."""

    def __init__(
        self,
        shape: Sequence[int],
        runs: Iterable[tuple[torch.Tensor, torch.Tensor]],
        bias: torch.Tensor | None,
    ) -> None:
        """Pack the weights. ``shape`` is (outputs, inputs).

        ``runs`` yields int8 [some outputs, inputs] and their scales, over 127. All runs but the last are
        of whole panels of 64 outputs.
        """
        library = native_library()
        assert library is not None, "nothing is compiled here"
        self._outputs, inputs = shape
        padded = -(-self._outputs // _PANEL) * _PANEL
        packed = torch.zeros(library.convoy_i8_size(inputs, self._outputs), dtype=torch.int8)
        start, scale, done = torch.zeros(padded, dtype=torch.int32), torch.empty(self._outputs), 0
        for weight, scales in runs:
            place = packed[library.convoy_i8_size(inputs, done) :]
            library.convoy_i8_pack(
                *(weight.contiguous().data_ptr(), inputs, len(weight)),
                *(place.data_ptr(), start[done:].data_ptr()),
            )
            scale[done : done + len(weight)] = scales
            done += len(weight)
        # Kept alive: the struct below has only their addresses.
        self._held = (packed, scale, start, bias)
        self.described = I8Linear(
            *(packed.data_ptr(), scale.data_ptr(), start.data_ptr()),
            *(None if bias is None else bias.data_ptr(), inputs, self._outputs),
        )
        self._reference = ctypes.byref(self.described)
        self._run = library.convoy_i8_linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map float32 [rows, inputs] to [rows, outputs]. The numbers of a row must be contiguous."""
        num_rows = x.shape[0]
        y = torch.empty(num_rows, self._outputs)
        done = self._run(
            *(self._reference, x.data_ptr(), x.stride(0), y.data_ptr(), num_rows, torch.get_num_threads())
        )
        if not done:
            raise MemoryError(f"there is no memory for {num_rows} rows of 8 bits")
        return y
