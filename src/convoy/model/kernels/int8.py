"""Compute linears with 8-bit weights and activations: dynamic W8A8 through oneDNN.

A weight matrix is rounded once, symmetrically, with one scale for each output. A row of activations is
rounded at each call, symmetrically, with one scale for the row. Products and sums are whole numbers below
2^31, so they are the same in any order. All other steps are single operations on single numbers. A row's
bits are therefore the same beside any rows, on any number of threads, and on any machine that passes
`selfcheck`.

The operators are those that torch's own x86 quantiser calls (`torch/_inductor/fx_passes/quantization.py`).
They are no public interface. `w8a8_available` looks for them, and every shape is checked against
`int8_linear`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator

import torch
from torch import nn

from convoy.errors import SelfCheckError
from convoy.model.kernels.activation import activate
from convoy.model.kernels.linear import PackedLinear, w8a8_available
from convoy.model.kernels.native.choice import choose_library
from convoy.model.kernels.native.library import NativeLibrary
from convoy.model.kernels.native.linears import NativeI8
from convoy.model.kernels.registry import LinearKernel

_GREATEST = 127
# oneDNN multiplies unsigned with signed bytes. Signed with signed was 6,000 times slower, measured at one
# row.
_ZERO = 128
_NOTHING = torch.zeros(())
# Whole panels of `NativeI8`.
_ROUNDED_ROWS = 1024
# With so many inputs, sums of products of two numbers up to 127 stay below 2^31.
MAX_INPUTS = (2**31 - 1) // (_GREATEST * _GREATEST)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round float32 [n, width] to whole numbers from -127 to 127, in float32.

    Also returns each row's greatest value [n, 1]. A number's value is its whole number times the greatest
    over 127. A row of zeros has greatest 0, and a row that is not finite has NaN or infinity; the numbers
    in such a row make no difference.
    """
    greatest = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True)
    # Few calls, each over all numbers: at one row, the calls are the cost of rounding.
    return torch.addcdiv(_NOTHING, x, greatest, value=_GREATEST).round_(), greatest


def round_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a matrix [out, in] to int8 from -127 to 127.

    Also returns the scale of each output's row, [out].
    """
    rounded, scales, start = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight)), 0
    for some, scale in rounded_runs(weight):
        rows = slice(start, start := start + len(some))
        rounded[rows], scales[rows] = some, scale
    return rounded, scales


def rounded_runs(weight: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the parts of `round_weight`, some rows at a time.

    Float copies of a whole matrix would be the peak of loading.
    """
    for start in range(0, len(weight), _ROUNDED_ROWS):
        dense = weight[start : start + _ROUNDED_ROWS].detach().to(torch.float32)
        scale = dense.abs().amax(-1, keepdim=True).div_(_GREATEST)
        # A row of zeros has scale 0, and 0 / 0 is NaN.
        rounded = dense.div(scale).round_().nan_to_num_(0.0, 0.0, 0.0)
        yield rounded.to(torch.int8), scale.view(-1)


def int8_linear(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return the product slowly, as the reference, with sums in float64.

    ``x`` is float32 [n, in], ``weight`` has whole numbers [out, in], ``weight_scale`` is [out].
    """
    rounded, greatest = quantize_rows(x)
    sums = (rounded.to(torch.float64) @ weight.to(torch.float64).t()).to(torch.float32)
    y = sums * (weight_scale / _GREATEST) * greatest
    return y if bias is None else y + bias


class _OneDnn:
    """Multiply whole numbers by a matrix with oneDNN's 8-bit linear, in float32."""

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        self._packed = torch.ops.onednn.qlinear_prepack(weight, None)
        self._scale, self._zeros = scale, torch.zeros(len(scale), dtype=torch.int32)

    def __call__(self, rounded: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            *(rounded.add_(_ZERO).to(torch.uint8), 1.0, _ZERO, self._packed, self._scale, self._zeros, None),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        return y


class _Fbgemm:
    """Multiply whole numbers by a matrix with FBGEMM, in half the time.

    FBGEMM rounds its input, which is whole already.
    """

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        zeros = torch.zeros(len(scale), dtype=torch.int64)
        with warnings.catch_warnings():
            # Torch warns that it will drop these tensors. `fbgemm_holds` is then false.
            warnings.simplefilter("ignore")
            tensor = torch._make_per_channel_quantized_tensor(weight, scale.to(torch.float64), zeros, 0)
            self._packed = torch.ops.quantized.linear_prepack(tensor, None)

    def __call__(self, rounded: torch.Tensor) -> torch.Tensor:
        run = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        y: torch.Tensor = run(rounded, 1.0, _ZERO, self._packed)
        return y


@functools.cache
def fbgemm_holds() -> bool:
    """Return whether torch has FBGEMM's 8-bit linear here, with sums that do not saturate on this CPU.

    Without the vector instructions for such sums, FBGEMM adds pairs in 16 bits.
    """
    weight = torch.full((16, 64), _GREATEST, dtype=torch.int8)
    try:
        found = _Fbgemm(weight, torch.ones(16))(torch.full((3, 64), float(_GREATEST)))
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return bool((found == 64 * _GREATEST * _GREATEST).all())


@functools.cache
def int8_library(offered: tuple[NativeLibrary, ...] | None = None) -> NativeLibrary | None:
    """Return the compiled code whose 8-bit linears have the reference's bits, as FBGEMM's have, or None.

    ``offered`` is as `choose_library` takes it.
    """
    return choose_library("8-bit linears", _holds, offered)


def _holds(library: NativeLibrary) -> bool:
    generator = torch.Generator().manual_seed(20)
    weight, scale = round_weight(torch.randn(70, 105, generator=generator))
    bias, x = torch.randn(70, generator=generator), torch.randn(17, 105, generator=generator)
    expected = int8_linear(x, weight, scale, bias)
    return torch.equal(expected, NativeI8(weight.shape, [(weight, scale / _GREATEST)], bias, library)(x))


class RoundedLinear(PackedLinear):
    """Compute a linear from rounded weights. Nothing of the float layout is kept."""

    _native = None

    @property
    def takes_lone_rows(self) -> bool:
        """Return True: rows are rounded by themselves, and sums of whole numbers are exact."""
        return True

    @property
    def packed(self) -> list[torch.Tensor]:
        """Return no weights, since none are in oneDNN's float layout."""
        return []

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """Return (x W^T + b) * factor, for ``factor`` of the result's shape."""
        y: torch.Tensor = self(x)
        return y.mul_(factor)


class Int8Linear(RoundedLinear):
    """Compute y = activation(x W^T + b) from 8-bit weights. The float weights are not kept.

    ``activation`` is one of `ACTIVATIONS`, and ``offered`` is as `choose_library` takes it.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None = None,
        offered: tuple[NativeLibrary, ...] | None = None,
    ) -> None:
        # The parent's constructor would pack the float weights, so it is skipped.
        nn.Module.__init__(self)
        if not w8a8_available():
            raise SelfCheckError(
                "this build of torch has no 8-bit oneDNN linears",
                hint='set kernel = "auto", without --quantize',
            )
        self.out_features, self.in_features = weight.shape
        self._bias = None if bias is None else bias.detach().to(torch.float32).clone()
        self._rows: NativeI8 | None = None
        # A row of activations is scaled by its greatest value over 127. The division is done here, in the
        # weight's scales.
        library = int8_library(offered)
        if library is not None:
            runs = ((rounded, scale / _GREATEST) for rounded, scale in rounded_runs(weight))
            self._rows = NativeI8(weight.shape, runs, self._bias, library)
        else:
            rounded, scale = round_weight(weight)
            self._sums = (_Fbgemm if fbgemm_holds() else _OneDnn)(rounded, scale.div_(_GREATEST))
        self.activation = activation
        self.weight_bytes = weight.numel() + 4 * (len(weight) + (0 if bias is None else bias.numel()))

    @property
    def native(self) -> NativeI8 | None:
        """Return the compiled form, as `PackedLinear.native` does."""
        return self._rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., rows, in_features] to [..., rows, out_features]."""
        rows = x.reshape(-1, self.in_features)
        if self._rows is not None:
            y = self._rows(rows if rows.stride(1) == 1 else rows.contiguous())
        else:
            rounded, greatest = quantize_rows(rows)
            y = self._sums(rounded).mul_(greatest)
            if self._bias is not None:
                y.add_(self._bias)
        return activate(y, self.activation).view(*x.shape[:-1], self.out_features)


class Int8Mlp(nn.Module):
    """Compute down(activation(gate(x)) * up(x)) with gate and up in one linear.

    With few rows the calls are most of the cost.
    """

    def __init__(self, gate_linear: PackedLinear, up_linear: PackedLinear, down: PackedLinear) -> None:
        super().__init__()
        (gate, gate_bias), (up, up_bias) = gate_linear.dense(), up_linear.dense()
        bias = None if gate_bias is None or up_bias is None else torch.cat((gate_bias, up_bias))
        self.gate_up = Int8Linear(torch.cat((gate, up)), bias)
        self.down = round_to_8_bits(down)
        # The width of gate, and of up.
        self.activation, self.width = gate_linear.activation, gate.shape[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., rows, hidden] to the same shape."""
        both = self.gate_up(x)
        gate, up = both[..., : self.width], both[..., self.width :]
        down: torch.Tensor = self.down(activate(gate, self.activation).mul_(up))
        return down


def round_to_8_bits(linear: PackedLinear) -> Int8Linear:
    """Return the 8-bit form of a packed linear."""
    return Int8Linear(*linear.dense(), linear.activation)


KERNEL = LinearKernel(w8a8_available, Int8Linear, round_to_8_bits, Int8Mlp)
