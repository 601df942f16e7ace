"""Multiply by matrices on MLX, plain or in codes as stored: by one for all rows, or by each row's experts.

A gated MLP and the activations are here too. `experts` chooses experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

Activation = Callable[[mx.array], mx.array]


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
            _for_codes(x),
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
            _for_codes(x),
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

    def outputs(self, rows: slice) -> CodedMatrix:
        """Return some outputs of the matrix, or of each expert's, copied."""
        return self._of([mx.contiguous(array[..., rows, :]) for array in self.arrays])

    def inputs(self, columns: slice) -> CodedMatrix:
        """Return whole groups of inputs of the matrix, or of each expert's, copied."""
        words = slice(columns.start * self.bits // 32, columns.stop * self.bits // 32)
        groups = slice(columns.start // self.group_size, columns.stop // self.group_size)
        codes, *factors = self.arrays
        parts = [codes[..., words], *(one[..., groups] for one in factors)]
        return self._of([mx.contiguous(part) for part in parts])

    def experts(self, own: range) -> CodedMatrix:
        """Return some experts of a stack, copied."""
        return self._of([mx.contiguous(array[own.start : own.stop]) for array in self.arrays])

    def padded(self, num_rows: int) -> CodedMatrix:
        """Return the matrix with rows of zeros behind its own, ``num_rows`` in all."""
        return self._of([_padded(array, num_rows) for array in self.arrays])

    @property
    def num_inputs(self) -> int:
        return int(self.codes.shape[-1]) * 32 // self.bits

    def _of(self, arrays: Sequence[mx.array]) -> CodedMatrix:
        codes, scales, *biases = arrays
        return replace(self, codes=codes, scales=scales, biases=biases[0] if biases else None)

    @property
    def arrays(self) -> list[mx.array]:
        return [self.codes, self.scales, *(() if self.biases is None else (self.biases,))]


def _for_codes(x: mx.array) -> mx.array:
    """Return rows in the dtype in which products with codes are added well.

    MLX's CPU build adds products of bfloat16 rows in bfloat16. That was 24 times as far from the exact sum,
    in five times the time. Widening rounds nothing.
    """
    return x if mx.metal.is_available() else x.astype(mx.float32)


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

    def outputs(self, rows: slice) -> PlainMatrix:
        """Return some outputs of the matrix, or of each expert's, copied."""
        return PlainMatrix(mx.contiguous(self.weight[..., rows, :]))

    def inputs(self, columns: slice) -> PlainMatrix:
        """Return some inputs of the matrix, or of each expert's, copied."""
        return PlainMatrix(mx.contiguous(self.weight[..., columns]))

    def experts(self, own: range) -> PlainMatrix:
        """Return some experts of a stack, copied."""
        return PlainMatrix(mx.contiguous(self.weight[own.start : own.stop]))

    def padded(self, num_rows: int) -> PlainMatrix:
        """Return the matrix with rows of zeros behind its own, ``num_rows`` in all."""
        return PlainMatrix(_padded(self.weight, num_rows))

    @property
    def num_inputs(self) -> int:
        return int(self.weight.shape[-1])

    @property
    def arrays(self) -> list[mx.array]:
        return [self.weight]


Matrix = CodedMatrix | PlainMatrix


def _padded(array: mx.array, num_rows: int) -> mx.array:
    return mx.pad(array, [(0, num_rows - array.shape[0]), (0, 0)])


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
    """Compute down(activation(gate) * up)."""

    gate: Linear
    up: Linear
    down: Linear
    activate: Activation

    def __call__(self, x: mx.array) -> mx.array:
        return self.down(self.activate(self.gate(x)) * self.up(x))

    @property
    def arrays(self) -> list[mx.array]:
        return self.gate.arrays + self.up.arrays + self.down.arrays


def _silu(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x)


def _gelu_tanh(x: mx.array) -> mx.array:
    """Return the approximation by a hyperbolic tangent of Hendrycks and Gimpel, 2016."""
    return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


# By the word of config.json.
ACTIVATIONS: dict[str, Activation] = {
    "silu": _silu,
    "swish": _silu,
    "gelu_pytorch_tanh": _gelu_tanh,
}
