"""Multiply by matrices on MLX, plain or in codes as stored: by one for all rows, or by each row's experts."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class CodedMatrix:
    """Hold a quantised matrix of [outputs, inputs], or a stack of experts, as `mx.quantize` lays it out."""

    codes: mx.array
    scales: mx.array
    # None in modes without a least value.
    biases: mx.array | None
    group_size: int
    bits: int
    mode: str

    def multiply(self, x: mx.array) -> mx.array:
        """Return ``x`` [rows, inputs] times the matrix, in the dtype of ``x``."""
        found = mx.quantized_matmul(
            x,
            self.codes,
            self.scales,
            self.biases,
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        )
        return found.astype(x.dtype)

    def multiply_chosen(self, x: mx.array, numbers: mx.array) -> mx.array:
        """Return ``x`` [rows, 1 or chosen, 1, inputs] times the experts ``numbers`` [rows, chosen]."""
        found = mx.gather_qmm(
            x,
            self.codes,
            self.scales,
            self.biases,
            rhs_indices=numbers,
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        )
        return found.astype(x.dtype)

    def rows(self, tokens: mx.array) -> mx.array:
        """Return the rows of ``tokens`` without codes."""
        biases = None if self.biases is None else self.biases[tokens]
        return mx.dequantize(
            self.codes[tokens],
            self.scales[tokens],
            biases,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        )

    @property
    def arrays(self) -> list[mx.array]:
        return [self.codes, self.scales, *(() if self.biases is None else (self.biases,))]


@dataclass(frozen=True)
class PlainMatrix:
    """Hold a matrix of [outputs, inputs], or a stack of experts, in the dtype of the activations."""

    weight: mx.array

    def multiply(self, x: mx.array) -> mx.array:
        """Return ``x`` [rows, inputs] times the matrix."""
        return x @ self.weight.T

    def multiply_chosen(self, x: mx.array, numbers: mx.array) -> mx.array:
        """Return ``x`` [rows, 1 or chosen, 1, inputs] times the experts ``numbers`` [rows, chosen]."""
        weight = self.weight.swapaxes(-1, -2)
        if mx.metal.is_available():
            return mx.gather_mm(x, weight, rhs_indices=numbers)
        # MLX's CPU build gathers matrices of float32 alone. Widening rounds nothing.
        wide = mx.gather_mm(x.astype(mx.float32), weight.astype(mx.float32), rhs_indices=numbers)
        return wide.astype(x.dtype)

    def rows(self, tokens: mx.array) -> mx.array:
        """Return the rows of ``tokens``."""
        return self.weight[tokens]

    @property
    def arrays(self) -> list[mx.array]:
        return [self.weight]


Matrix = CodedMatrix | PlainMatrix


@dataclass(frozen=True)
class Linear:
    """Hold a matrix and its bias, if it has one."""

    matrix: Matrix
    bias: mx.array | None

    def __call__(self, x: mx.array) -> mx.array:
        found = self.matrix.multiply(x)
        return found if self.bias is None else found + self.bias

    @property
    def arrays(self) -> list[mx.array]:
        return self.matrix.arrays + ([] if self.bias is None else [self.bias])


@dataclass(frozen=True)
class GatedMlp:
    """Compute down(silu(gate) * up)."""

    gate: Linear
    up: Linear
    down: Linear

    def __call__(self, x: mx.array) -> mx.array:
        gate = self.gate(x)
        return self.down(gate * mx.sigmoid(gate) * self.up(x))

    @property
    def arrays(self) -> list[mx.array]:
        return self.gate.arrays + self.up.arrays + self.down.arrays


@dataclass(frozen=True)
class Experts:
    """Compute the experts that a router chooses for each row. Matrices are [experts, outputs, inputs]."""

    router: Linear
    gate: Matrix
    up: Matrix
    down: Matrix
    num_chosen: int
    # Whether the weights of the chosen ones add up to 1.
    is_normed: bool

    def __call__(self, x: mx.array) -> mx.array:
        """Return the weighted sum of each row's experts, best first, for ``x`` [T, hidden]."""
        scores = mx.softmax(self.router(x).astype(mx.float32), axis=-1)
        numbers = mx.argsort(-scores, axis=-1)[:, : self.num_chosen]
        weights = mx.take_along_axis(scores, numbers, axis=-1)
        if self.is_normed:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        # [T, 1, 1, hidden], so that each of a row's experts multiplies a matrix of one row.
        rows = x[:, None, None]
        gate = self.gate.multiply_chosen(rows, numbers)
        up = self.up.multiply_chosen(rows, numbers)
        found = self.down.multiply_chosen(gate * mx.sigmoid(gate) * up, numbers)
        return (found[:, :, 0] * weights[..., None].astype(x.dtype)).sum(axis=1)

    @property
    def arrays(self) -> list[mx.array]:
        return self.router.arrays + self.gate.arrays + self.up.arrays + self.down.arrays
