"""Multiply by a matrix in its stored form, with the bits of `float_linear` over the unpacked matrix.

The unpacked matrix never exists as a whole. Where no compiled kernel knows a form, some outputs at a time
are unpacked and multiplied in float32, and forgotten again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from convoy.errors import SelfCheckError
from convoy.model.kernels.activation import activate
from convoy.model.kernels.linear import LEAST_ROWS, PackedLinear, packed_available, pad_rows
from convoy.model.kernels.native.library import NativeLibrary, native_library
from convoy.model.kernels.stored.matrix import StoredMatrix, StoredRange
from convoy.model.kernels.stored.packed import (
    NativeStored,
    PackedRange,
    float_library,
    onednn_holds,
    pack_range,
)
from convoy.model.kernels.stored.weights import own_range, plain_matrix

# Numbers unpacked at a time: 4 MiB of float32.
_SLICE_ELEMENTS = 1 << 20
# The outputs that lie together in oneDNN's layout.
_PANEL = 64


class StoredLinear(PackedLinear):
    """Compute y = activation(x W^T + b) in float32 over a stored matrix.

    A row has the same bits alone and beside others. ``activation`` is one of `ACTIVATIONS`. Ranges with a
    compiled kernel are copied into its layout, and the others are copied as they are. ``offered`` is as
    `choose_library` takes it.
    """

    _native = None
    _left_native = False

    def __init__(
        self,
        matrix: StoredMatrix,
        bias: torch.Tensor | None,
        activation: str | None = None,
        offered: Sequence[NativeLibrary] | None = None,
    ) -> None:
        # The parent's constructor would pack float32 weights, so it is skipped.
        nn.Module.__init__(self)
        if not exact_available():
            raise SelfCheckError("this build of torch has no packed oneDNN linears")
        self.out_features, self.in_features = matrix.shape
        self._bias = None if bias is None else bias.detach().to(torch.float32).clone()
        self.activation = activation
        self._parts: list[PackedRange | StoredRange] = [
            pack_range(one, offered) or own_range(one) for one in matrix.ranges
        ]
        packed: dict[NativeLibrary, list[tuple[int, PackedRange]]] = {}
        for first, one in self._placed():
            if isinstance(one, PackedRange):
                packed.setdefault(one.library, []).append((first, one))
        # One for each library. All forms have the same one, unless a form's kernel was refused.
        self._stored = [NativeStored(ranges, self._bias) for ranges in packed.values()]
        self.weight_bytes = sum(one.num_bytes for one in self._parts)
        self.weight_bytes += 0 if bias is None else 4 * bias.numel()

    @property
    def takes_lone_rows(self) -> bool:
        """Return True: a lone row is padded here where that is needed."""
        return True

    @property
    def packed(self) -> list[torch.Tensor]:
        """Return no weights, since none are in oneDNN's float layout."""
        return []

    @property
    def is_compiled(self) -> bool:
        """Return whether compiled kernels multiply by all ranges."""
        return bool(self._stored) and all(isinstance(one, PackedRange) for one in self._parts)

    @property
    def stored(self) -> NativeStored | None:
        """Return the compiled form, or None unless it alone multiplies by all ranges."""
        return self._stored[0] if self.is_compiled and len(self._stored) == 1 else None

    def leave_native(self) -> None:
        """Unpack some outputs at a time from now on, and multiply by torch's operators."""
        self._stored = []
        self._left_native = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., rows, in_features] to [..., rows, out_features]."""
        rows = x.reshape(-1, self.in_features)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        y = torch.empty(len(rows), self.out_features)
        for stored in self._stored:
            stored(rows, y)
        for first, one in self._placed():
            if len(rows) and (not self._stored or isinstance(one, StoredRange)):
                self._by_slices(one, rows, first, y)
        return activate(y, self.activation).view(*x.shape[:-1], self.out_features)

    def dense(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weight [out_features, in_features] and the bias, unpacked."""
        return torch.cat([one.values(slice(0, one.outputs)) for one in self._parts]), self._bias

    def row_values(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the weights of some outputs, float32 [n, in_features], for int64 ``ids`` [n]."""
        found = torch.empty(len(ids), self.in_features)
        for first, one in self._placed():
            own = ((ids >= first) & (ids < first + one.outputs)).nonzero().flatten()
            if len(own):
                found[own] = one.values(ids[own] - first)
        return found

    def _placed(self) -> Iterator[tuple[int, PackedRange | StoredRange]]:
        """Yield each range with its first output."""
        first = 0
        for one in self._parts:
            yield first, one
            first += one.outputs

    def _by_slices(
        self, one: PackedRange | StoredRange, x: torch.Tensor, first: int, y: torch.Tensor
    ) -> None:
        """Multiply x [rows, in_features] by some outputs of a range at a time, into y [rows, out_features].

        oneDNN may give few outputs another layout, and other sums. So the last slice has the rest, and few
        outputs of a larger matrix get zeros behind them.
        """
        padded = pad_rows(x, LEAST_ROWS)
        step = max(2, _SLICE_ELEMENTS // (self.in_features * _PANEL)) * _PANEL
        num_slices, least = max(1, one.outputs // step), min(2 * _PANEL, self.out_features)
        for number in range(num_slices):
            rows = slice(number * step, one.outputs if number == num_slices - 1 else (number + 1) * step)
            outputs = slice(first + rows.start, first + rows.stop)
            values = one.values(rows)
            if len(values) < least:
                values = nn.functional.pad(values, (0, 0, 0, least - len(values)))
            bias = None if self._bias is None else self._bias[outputs]
            if bias is not None and len(bias) < least:
                bias = nn.functional.pad(bias, (0, least - len(bias)))
            linear = PackedLinear(values, bias) if self._left_native else float_linear(values, bias)
            y[:, outputs] = linear(padded)[: len(x), : rows.stop - rows.start]


def exact_available() -> bool:
    """Return whether there are float32 linears with one order of sums: oneDNN's packed, or compiled ones."""
    return packed_available() or native_library() is not None


def stored_linear(
    weight: torch.Tensor | StoredMatrix, bias: torch.Tensor | None, activation: str | None = None
) -> PackedLinear:
    """Return a linear over a float matrix, or over a stored one."""
    if isinstance(weight, StoredMatrix):
        return StoredLinear(weight, bias, activation)
    return float_linear(weight, bias, activation)


def float_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None = None
) -> PackedLinear:
    """Return a linear over a float matrix, in the written order of sums.

    It is oneDNN's, or the compiled one where oneDNN adds in another order, or has a layout that compiled
    code does not read. With AVX2 some shapes have such an order or layout.
    """
    outputs, inputs = weight.shape
    # A panel around a single output would be mostly empty.
    if (outputs == 1 and packed_available()) or onednn_holds(inputs, min(outputs, 2 * _PANEL)):
        linear = PackedLinear(weight, bias, activation)
        if linear.takes_lone_rows or outputs == 1 or float_library() is None:
            return linear
        del linear
    return StoredLinear(plain_matrix(weight.detach().to(torch.float32)), bias, activation)
