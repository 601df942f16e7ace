"""Multiply few rows by compiled code, over oneDNN's own packed weights.

There is one chain of products for each output, in runs of a written length, compared with oneDNN's bits.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch

from convoy.model.kernels.native.choice import choose_library
from convoy.model.kernels.native.library import F32Linear, NativeLibrary
from convoy.model.kernels.packing import has_place, pack_float32

# oneDNN multiplies more rows as fast: then products take the time, and not the reading of weights.
MAX_F32_ROWS = 18
_PANEL, _INPUTS = 64, 16
# The written order: runs of 1,024 inputs, or of 512 in parts of up to 1,024.
_LONG_RUN, _SHORT_RUN = 1024, 512
_PROBE_ROWS = 5


class NativeF32:
    """Compute x W^T + b over oneDNN's packed weights, for up to `MAX_F32_ROWS` rows."""

    def __init__(
        self,
        packed: Sequence[torch.Tensor],
        runs: Sequence[int],
        bias: torch.Tensor | None,
        library: NativeLibrary,
    ) -> None:
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
        self.library = library
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
    if not all(_is_in_panels(part) for part in packed):
        return None
    chosen = {f32_library(part.shape[1], min(part.shape[0], 2 * _PANEL)) for part in packed}
    library = chosen.pop()
    if library is None or chosen or not all(map(_is_as_compared, packed)):
        return None
    return NativeF32(packed, [run_length(part.shape[1]) for part in packed], bias, library)


def run_length(inputs: int) -> int:
    """Return how many products of a part are added one after the other: see docs/exact.md."""
    if inputs > _LONG_RUN:
        return _LONG_RUN
    return min(inputs, _SHORT_RUN)


@functools.cache
def f32_library(
    inputs: int, outputs: int, offered: tuple[NativeLibrary, ...] | None = None
) -> NativeLibrary | None:
    """Return the compiled code that has oneDNN's bits over its packed weights, or None.

    ``offered`` is as `choose_library` takes it.
    """
    # oneDNN may have another layout or order, which is no fault of compiled code.
    holds = functools.partial(_holds, inputs, outputs)
    return choose_library("float32 linears", holds, offered, may_lack=True)


def _holds(inputs: int, outputs: int, library: NativeLibrary) -> bool:
    """Return whether the compiled linear over oneDNN's packed weights has oneDNN's bits."""
    generator = torch.Generator().manual_seed(20)
    weight = torch.randn(outputs, inputs, generator=generator)
    x = torch.randn(_PROBE_ROWS, inputs, generator=generator)
    packed = pack_float32(weight)
    if not _is_in_panels(packed):
        return False
    expected = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return torch.equal(expected, NativeF32([packed], [run_length(inputs)], None, library)(x))


def _is_as_compared(packed: torch.Tensor) -> bool:
    """Return whether a matrix has the layout of the smaller one that was compared.

    oneDNN chooses the layout by the number of outputs. With AVX2 a block of 192 outputs is another one.
    """
    outputs, inputs = packed.shape
    return outputs <= 2 * _PANEL or has_place(_compared(inputs), packed)


@functools.cache
def _compared(inputs: int) -> torch.Tensor:
    return pack_float32(torch.zeros(2 * _PANEL, inputs))


def _is_in_panels(packed: torch.Tensor) -> bool:
    """Return whether the packed memory has the size of panels.

    The contents are compared by `_holds`. The size must match first, so that compiled code stays
    inside.
    """
    outputs, inputs = packed.shape
    panels = -(-outputs // _PANEL) * _PANEL * -(-inputs // _INPUTS) * _INPUTS
    return int(torch.ops.mkldnn._nbytes(packed)) == 4 * panels
