"""Multiply by linears in which rows do not affect each other: pre-packed oneDNN float32.

A plain float32 linear picks its kernel, and with it the order of its sums, by the number of rows and
threads. oneDNN over weights packed once keeps one order per row for two or more rows. A lone row may take
another kernel, so callers pad it to two. `selfcheck` proves this on the machine at hand.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from convoy.errors import SelfCheckError
from convoy.model.kernels.activation import activate
from convoy.model.kernels.native.linears import MAX_F32_ROWS, NativeF32, native_f32
from convoy.model.kernels.packing import pack_float32

# oneDNN adds a row's products one after the other, and the rounding error grows with the length of such a
# run. Two runs half as long, added at the end, are as accurate as the blocked kernels of torch. oneDNN splits
# longer ones itself, and a second call would cost a sixth of the memory's rate.
_MIN_SPLIT, _MAX_SPLIT = 128, 640
# The fewest rows of a call. oneDNN reads weights faster for 4 to 6 rows than for fewer: for 2, 5 and 6 rows
# 0.37, 0.60 and 0.60 of the rate that a core can read at (bench/METHODOLOGY.md, `convoy bench floor`).
LEAST_ROWS = 5


def packed_available() -> bool:
    """Return whether this build of torch has oneDNN's packed linears (on x86-64 yes, on macOS no)."""
    return bool(
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def padded_count(num_rows: int, least: int = LEAST_ROWS) -> int:
    """Return the rows that the packed linears are given for ``num_rows``: eight counts between powers of two.

    oneDNN makes and keeps code for every count of rows that it meets: a megabyte for a layer's linears,
    and milliseconds of a step. Padding adds less than an eighth to more than `LEAST_ROWS`. A lone row may
    take another kernel, and few rows take a slower one, so both are padded.
    """
    step = max(1, 1 << max(0, num_rows.bit_length() - 4))
    return max(least, -(-num_rows // step) * step)


def pad_rows(x: torch.Tensor, least: int = LEAST_ROWS) -> torch.Tensor:
    """Return [T, ...] followed by copies of its last row, up to `padded_count`."""
    missing = padded_count(x.shape[0], least) - x.shape[0]
    return torch.cat((x, x[-1:].expand(missing, *x.shape[1:]))) if missing else x


def split_inputs(inputs: int) -> list[int]:
    """Return the inputs of each part of a linear: of both halves, or of the whole."""
    half = inputs // 2 if _MIN_SPLIT <= inputs <= _MAX_SPLIT else 0
    return [half, inputs - half] if half else [inputs]


class PackedLinear(nn.Module):
    """Compute y = activation(x W^T + b) in float32 over packed weights. The plain weights are not kept.

    It needs at least two rows, unless it `takes_lone_rows`. ``activation`` is one of `ACTIVATIONS`.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None = None
    ) -> None:
        super().__init__()
        if not packed_available():
            raise SelfCheckError("this build of torch has no packed oneDNN linears")
        self.out_features, self.in_features = weight.shape
        widths = split_inputs(self.in_features)
        self._half = widths[0] if len(widths) > 1 else 0
        parts = [weight[:, : self._half], weight[:, self._half :]] if self._half else [weight]
        self._packed = [pack_float32(part) for part in parts]
        self._bias = None if bias is None else bias.detach().to(torch.float32).clone()
        self.activation = activation
        self.weight_bytes = 4 * (weight.numel() + (0 if bias is None else bias.numel()))
        self._native: NativeF32 | None = native_f32(self._packed, self._bias)

    @property
    def takes_lone_rows(self) -> bool:
        """Return whether a lone row has the same bits as beside other rows."""
        return self._native is not None

    @property
    def native(self) -> NativeF32 | None:
        """Return the compiled form, or None without one."""
        return self._native

    def repack(self, packed: Sequence[torch.Tensor]) -> None:
        """Use these copies of `packed` instead. The old ones are freed."""
        self._packed = list(packed)
        if self._native is not None:
            self._native = native_f32(self._packed, self._bias)

    def leave_native(self) -> None:
        """Use torch's operators alone from now on."""
        self._native = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., rows, in_features] to [..., rows, out_features]."""
        if self._native is None or x.numel() > MAX_F32_ROWS * self.in_features:
            return activate(self._by_torch(x), self.activation)
        rows = x.reshape(-1, self.in_features)
        y = self._native(rows if rows.stride(1) == 1 else rows.contiguous())
        return activate(y, self.activation).view(*x.shape[:-1], self.out_features)

    def _by_torch(self, x: torch.Tensor) -> torch.Tensor:
        linear = torch.ops.mkldnn._linear_pointwise
        if not self._half:
            whole: torch.Tensor = linear(x, self._packed[0], self._bias, "none", [], "")
            return whole
        # Both halves are added in a fixed order, and the bias goes with the first.
        first = linear(x[..., : self._half], self._packed[0], self._bias, "none", [], "")
        y: torch.Tensor = linear.binary(x[..., self._half :], first, self._packed[1], None, "add")
        return y

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """Return (x W^T + b) * factor, for ``factor`` of the result's shape.

        The linear must have no activation.
        """
        y: torch.Tensor = self(x)
        return y.mul_(factor)

    @property
    def packed(self) -> list[torch.Tensor]:
        """Return the weights in oneDNN's layout, which only oneDNN can interpret."""
        return list(self._packed)

    def dense(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weight [out_features, in_features] and the bias, unpacked again."""
        parts = [part.to_dense() for part in self._packed]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), self._bias
