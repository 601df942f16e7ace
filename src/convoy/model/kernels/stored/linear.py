"""Multiply by a matrix in its stored form, with the bits of `float_linear` over the unpacked matrix.

The unpacked matrix never exists as a whole. Where no compiled kernel knows a form, some outputs at a time
are unpacked and multiplied in float32, and forgotten again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from convoy.errors import SelfCheckError
from convoy.model.kernels.activation import activate
from convoy.model.kernels.linear import LEAST_ROWS, PackedLinear, packed_available, pad_rows
from convoy.model.kernels.native.library import NativeLibrary, native_library
from convoy.model.kernels.stored.int8 import NativeInt8, int8_library, rounds_inputs
from convoy.model.kernels.stored.integers import int8_product, integers_of
from convoy.model.kernels.stored.matrix import StoredMatrix, StoredRange
from convoy.model.kernels.stored.packed import (
    NativeStored,
    PackedRange,
    float_library,
    onednn_holds,
    pack_range,
)
from convoy.model.kernels.stored.sample import Shape
from convoy.model.kernels.stored.weights import own_range, plain_matrix

# Numbers unpacked at a time: 4 MiB of float32.
_SLICE_ELEMENTS = 1 << 20
# The outputs that lie together in oneDNN's layout.
_PANEL = 64


@dataclass(frozen=True, eq=False)
class _Part:
    """Hold a range with its first output, its shape, and whether rows may be rounded for it."""

    first: int
    held: PackedRange | StoredRange
    shape: Shape
    may_round: bool


class StoredLinear(PackedLinear):
    """Compute y = activation(x W^T + b) in float32 over a stored matrix.

    A row has the same bits alone and beside others. ``activation`` is one of `ACTIVATIONS`. Ranges with a
    compiled kernel are copied into its layout, and the others are copied as they are. ``offered`` is as
    `choose_library` takes it.

    After `round_inputs`, rows are rounded to 8 bits for the ranges whose form allows products of whole
    numbers.
    """

    _native = None
    _is_rounding = False
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
        self.activation, self._offered = activation, offered
        self._parts: list[_Part] = []
        first = 0
        for one in matrix.ranges:
            sample = one if isinstance(one, StoredRange) else one.sample
            held = pack_range(one, offered) or own_range(one)
            self._parts.append(_Part(first, held, Shape.of(sample), rounds_inputs(sample)))
            first += one.outputs
        # One for each library. All forms have the same one, unless a form's kernel was refused.
        self._stored = self._exact_natives()
        self._int8: list[NativeInt8] = []
        self.weight_bytes = sum(part.held.num_bytes for part in self._parts)
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
        return not self._left_native and all(isinstance(part.held, PackedRange) for part in self._parts)

    @property
    def stored(self) -> tuple[NativeStored | None, NativeInt8 | None] | None:
        """Return the compiled forms that multiply exactly and with rounded rows, None for what is not there.

        Returns None unless these two together multiply by all ranges.
        """
        if not self.is_compiled or len(self._stored) > 1 or len(self._int8) > 1:
            return None
        return next(iter(self._stored), None), next(iter(self._int8), None)

    def round_inputs(self) -> None:
        """Round rows to 8 bits from now on, for all ranges whose form allows it.

        Raises SelfCheckError where no compiled code has the bits of the definition in `integers`.
        """
        ranges: dict[NativeLibrary, list[tuple[int, PackedRange]]] = {}
        for part in self._parts:
            if part.may_round and isinstance(part.held, PackedRange):
                library = int8_library(part.shape, self._offered)
                ranges.setdefault(library, []).append((part.first, part.held))
        self._is_rounding = True
        self._stored = self._exact_natives()
        self._int8 = [NativeInt8(some, self._bias, library) for library, some in ranges.items()]

    @property
    def exact_forms(self) -> set[str]:
        """Return the forms of the ranges for which rows are not rounded."""
        return {part.shape.form for part in self._parts if not self._rounds(part)}

    @property
    def is_rounding(self) -> bool:
        """Return whether rows are rounded for some outputs."""
        return any(map(self._rounds, self._parts))

    def leave_native(self) -> None:
        """Unpack some outputs at a time from now on, and multiply by torch's operators.

        Raises SelfCheckError where rows are rounded, because packed codes are then used as they are.
        """
        if self._int8:
            raise SelfCheckError("the compiled 8-bit products change a row's bits here")
        self._stored = []
        self._left_native = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., rows, in_features] to [..., rows, out_features]."""
        rows = x.reshape(-1, self.in_features)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        y = torch.empty(len(rows), self.out_features)
        for native in (*self._stored, *self._int8):
            native(rows, y)
        for part in self._parts:
            if len(rows) and (self._left_native or isinstance(part.held, StoredRange)):
                self._by_slices(part, rows, y)
        return activate(y, self.activation).view(*x.shape[:-1], self.out_features)

    def dense(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weight [out_features, in_features] and the bias, unpacked."""
        held = [part.held for part in self._parts]
        return torch.cat([one.values(slice(0, one.outputs)) for one in held]), self._bias

    def row_values(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the weights of some outputs, float32 [n, in_features], for int64 ``ids`` [n]."""
        if len(self._parts) == 1:
            return self._parts[0].held.values(ids)
        found = torch.empty(len(ids), self.in_features)
        for part in self._parts:
            own = ((ids >= part.first) & (ids < part.first + part.held.outputs)).nonzero().flatten()
            if len(own):
                found[own] = part.held.values(ids[own] - part.first)
        return found

    def _rounds(self, part: _Part) -> bool:
        return self._is_rounding and part.may_round

    def _exact_natives(self) -> list[NativeStored]:
        """Return the compiled forms of the packed ranges for which rows are not rounded."""
        packed: dict[NativeLibrary, list[tuple[int, PackedRange]]] = {}
        for part in self._parts:
            if isinstance(part.held, PackedRange) and not self._rounds(part):
                packed.setdefault(part.held.library, []).append((part.first, part.held))
        return [NativeStored(ranges, self._bias) for ranges in packed.values()]

    def _by_slices(self, part: _Part, x: torch.Tensor, y: torch.Tensor) -> None:
        """Multiply x [rows, in_features] by some outputs of a range at a time, into y [rows, out_features].

        oneDNN may give few outputs another layout, and other sums. So the last slice has the rest, and few
        outputs of a larger matrix get zeros behind them.
        """
        one, first = part.held, part.first
        padded = pad_rows(x, LEAST_ROWS)
        step = max(2, _SLICE_ELEMENTS // (self.in_features * _PANEL)) * _PANEL
        num_slices, least = max(1, one.outputs // step), min(2 * _PANEL, self.out_features)
        for number in range(num_slices):
            rows = slice(number * step, one.outputs if number == num_slices - 1 else (number + 1) * step)
            outputs = slice(first + rows.start, first + rows.stop)
            bias = None if self._bias is None else self._bias[outputs]
            if self._rounds(part):
                assert isinstance(one, StoredRange), "packed ranges are multiplied by compiled code"
                y[:, outputs] = int8_product(x, integers_of(one.rows(rows)), bias)
                continue
            values = one.values(rows)
            if len(values) < least:
                values = nn.functional.pad(values, (0, 0, 0, least - len(values)))
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
