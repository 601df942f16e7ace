"""Multiply by a matrix in its stored form, with the bits of `PackedLinear` over the unpacked matrix.

The unpacked matrix never exists as a whole. Where no compiled kernel knows a form, some outputs at a time
are unpacked and multiplied in float32, and forgotten again.
"""

from __future__ import annotations

import torch
from torch import nn

from convoy.errors import SelfCheckError
from convoy.model.kernels.activation import activate
from convoy.model.kernels.linear import LEAST_ROWS, PackedLinear, packed_available, pad_rows
from convoy.model.kernels.stored.matrix import StoredMatrix

# Numbers unpacked at a time: 4 MiB of float32.
_SLICE_ELEMENTS = 1 << 20
# The outputs that lie together in oneDNN's layout.
_PANEL = 64


class StoredLinear(PackedLinear):
    """Compute y = activation(x W^T + b) in float32 over a stored matrix.

    A row has the same bits alone and beside others. ``activation`` is one of `ACTIVATIONS`.
    """

    _native = None

    def __init__(
        self, matrix: StoredMatrix, bias: torch.Tensor | None, activation: str | None = None
    ) -> None:
        # The parent's constructor would pack float32 weights, so it is skipped.
        nn.Module.__init__(self)
        if not packed_available():
            raise SelfCheckError("this build of torch has no packed oneDNN linears")
        self.out_features, self.in_features = matrix.shape
        self._matrix = matrix
        self._bias = None if bias is None else bias.detach().to(torch.float32).clone()
        self.activation = activation
        self.weight_bytes = matrix.num_bytes + (0 if bias is None else 4 * bias.numel())

    @property
    def takes_lone_rows(self) -> bool:
        """Return True: a lone row is padded here where that is needed."""
        return True

    @property
    def packed(self) -> list[torch.Tensor]:
        """Return no weights, since none are in oneDNN's float layout."""
        return []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., rows, in_features] to [..., rows, out_features]."""
        rows = x.reshape(-1, self.in_features)
        y = self._by_slices(rows if rows.stride(1) == 1 else rows.contiguous())
        return activate(y, self.activation).view(*x.shape[:-1], self.out_features)

    def _by_slices(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply [rows, in_features] by some outputs at a time."""
        padded = pad_rows(x, LEAST_ROWS)
        y = torch.empty(x.shape[0], self.out_features)
        step = max(1, _SLICE_ELEMENTS // (self.in_features * _PANEL)) * _PANEL
        for start in range(0, self.out_features, step):
            outputs = slice(start, min(start + step, self.out_features))
            bias = None if self._bias is None else self._bias[outputs]
            part = PackedLinear(self._matrix.rows(outputs).dense(), bias)
            y[:, outputs] = part(padded)[: x.shape[0]]
        return y

    def dense(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weight [out_features, in_features] and the bias, unpacked."""
        return self._matrix.dense(), self._bias


def stored_linear(
    weight: torch.Tensor | StoredMatrix, bias: torch.Tensor | None, activation: str | None = None
) -> PackedLinear:
    """Return a linear over a float matrix, or over a stored one."""
    if isinstance(weight, StoredMatrix):
        return StoredLinear(weight, bias, activation)
    return PackedLinear(weight, bias, activation)
