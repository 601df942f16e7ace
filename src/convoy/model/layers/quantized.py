"""Linears with 8-bit weights and activations: dynamic W8A8 through oneDNN.

A weight matrix is rounded once, symmetric, with one scale for each output; a row of activations each time,
symmetric, with one scale for itself. Products and sums are whole numbers below 2^31, so they are the same in
any order, and what surrounds them is single operations on single numbers: a row's bits depend on no other
row, on no thread count, and on no machine whose `selfcheck` passed.

The operators are those that torch's own x86 quantiser calls (`torch/_inductor/fx_passes/quantization.py`).
They are no public interface, hence `w8a8_available` and a check of every shape against `int8_linear`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import nn

from convoy.errors import SelfCheckError
from convoy.model.kernels.activation import activate
from convoy.model.kernels.linear import PackedLinear, w8a8_available
from convoy.model.kernels.native.library import native_library
from convoy.model.kernels.native.linears import NativeI8
from convoy.model.layers.exact import ExactMlp
from convoy.model.layers.experts import ExactRouter

_GREATEST = 127
# oneDNN multiplies unsigned with signed bytes; signed with signed it did 6,000 times slower, seen at one row
_ZERO = 128
_NOTHING = torch.zeros(())
_ROUNDED_ROWS = 1024  # whole panels of `NativeI8`
# Sums of products of two numbers up to 127 stay below 2^31 for so many inputs.
MAX_INPUTS = (2**31 - 1) // (_GREATEST * _GREATEST)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 [n, width] as whole numbers from -127 to 127, in float32, and each row's greatest [n, 1].

    A number is worth its whole number times the greatest over 127. A row of zeros has 0, one that is not
    finite NaN or infinity; what stands in such a row makes no difference.
    """
    greatest = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True)
    # few calls, each over all numbers: at one row, calls are what rounding costs
    return torch.addcdiv(_NOTHING, x, greatest, value=_GREATEST).round_(), greatest


def round_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix [out, in] as int8 from -127 to 127, and the scale of each output's row [out]."""
    rounded, scales, start = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight)), 0
    for some, scale in rounded_runs(weight):
        rows = slice(start, start := start + len(some))
        rounded[rows], scales[rows] = some, scale
    return rounded, scales


def rounded_runs(weight: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """As `round_weight`, some rows at a time: float copies of a whole matrix would be the peak of loading."""
    for start in range(0, len(weight), _ROUNDED_ROWS):
        dense = weight[start : start + _ROUNDED_ROWS].detach().to(torch.float32)
        scale = dense.abs().amax(-1, keepdim=True).div_(_GREATEST)
        # a row of zeros would be 0 / 0
        rounded = dense.div(scale).round_().nan_to_num_(0.0, 0.0, 0.0)
        yield rounded.to(torch.int8), scale.view(-1)


def int8_linear(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The slow reference: x [n, in], whole ``weight`` [out, in], its scales [out]; sums in float64."""
    rounded, greatest = quantize_rows(x)
    sums = (rounded.to(torch.float64) @ weight.to(torch.float64).t()).to(torch.float32)
    y = sums * (weight_scale / _GREATEST) * greatest
    return y if bias is None else y + bias


class _OneDnn:
    """Whole numbers times a matrix by oneDNN's 8-bit linear, in float32."""

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
    """The same by FBGEMM, in half the time. It rounds what it is given, which is whole already."""

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        zeros = torch.zeros(len(scale), dtype=torch.int64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # these tensors are to leave torch: `fbgemm_holds` is false then
            tensor = torch._make_per_channel_quantized_tensor(weight, scale.to(torch.float64), zeros, 0)
            self._packed = torch.ops.quantized.linear_prepack(tensor, None)

    def __call__(self, rounded: torch.Tensor) -> torch.Tensor:
        run = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        y: torch.Tensor = run(rounded, 1.0, _ZERO, self._packed)
        return y


@functools.cache
def fbgemm_holds() -> bool:
    """Whether this build of torch has FBGEMM's 8-bit linear, and its sums do not saturate on this CPU.

    Without the vector instructions for such sums they are made of pairs in 16 bits.
    """
    weight = torch.full((16, 64), _GREATEST, dtype=torch.int8)
    try:
        found = _Fbgemm(weight, torch.ones(16))(torch.full((3, 64), float(_GREATEST)))
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return bool((found == 64 * _GREATEST * _GREATEST).all())


@functools.cache
def native_holds() -> bool:
    """Whether compiled 8-bit linears are here and have the reference's bits, as FBGEMM's have."""
    if native_library() is None:
        return False
    generator = torch.Generator().manual_seed(20)
    weight, scale = round_weight(torch.randn(70, 105, generator=generator))
    bias, x = torch.randn(70, generator=generator), torch.randn(17, 105, generator=generator)
    expected = int8_linear(x, weight, scale, bias)
    return torch.equal(expected, NativeI8(weight.shape, [(weight, scale / _GREATEST)], bias)(x))


class RoundedLinear(PackedLinear):
    """A linear from weights that were rounded; nothing of the float layout is kept."""

    _native = None

    @property
    def takes_lone_rows(self) -> bool:
        """Always: rows are rounded by themselves, and sums of whole numbers are exact."""
        return True

    @property
    def packed(self) -> list[torch.Tensor]:
        """None in oneDNN's float layout."""
        return []

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """(x W^T + b) * factor, for ``factor`` of the result's shape."""
        y: torch.Tensor = self(x)
        return y.mul_(factor)


class Int8Linear(RoundedLinear):
    """y = activation(x W^T + b) from 8-bit weights; the float weights are not kept.

    ``activation`` is one of `ACTIVATIONS`.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None = None
    ) -> None:
        nn.Module.__init__(self)  # and nothing of the float layout
        if not w8a8_available():
            raise SelfCheckError(
                "this build of torch has no 8-bit oneDNN linears",
                hint='set kernel = "auto", without --quantize',
            )
        self.out_features, self.in_features = weight.shape
        self._bias = None if bias is None else bias.detach().to(torch.float32).clone()
        self._rows: NativeI8 | None = None
        # a row's scale is its greatest over 127
        if native_holds():
            runs = ((rounded, scale / _GREATEST) for rounded, scale in rounded_runs(weight))
            self._rows = NativeI8(weight.shape, runs, self._bias)
        else:
            rounded, scale = round_weight(weight)
            self._sums = (_Fbgemm if fbgemm_holds() else _OneDnn)(rounded, scale.div_(_GREATEST))
        self.activation = activation
        self.weight_bytes = weight.numel() + 4 * (len(weight) + (0 if bias is None else bias.numel()))

    @property
    def native(self) -> NativeI8 | None:
        """As `PackedLinear.native`."""
        return self._rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., rows, in_features] to [..., rows, out_features]."""
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
    """down(activation(gate(x)) * up(x)) with gate and up in one linear: calls are what few rows cost."""

    def __init__(self, mlp: ExactMlp) -> None:
        super().__init__()
        (gate, gate_bias), (up, up_bias) = mlp.gate.dense(), mlp.up.dense()
        bias = None if gate_bias is None or up_bias is None else torch.cat((gate_bias, up_bias))
        self.gate_up = Int8Linear(torch.cat((gate, up)), bias)
        self.down = _rounded(mlp.down)
        self.activation, self.width = mlp.gate.activation, gate.shape[0]  # of gate, and of up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., rows, hidden] to the same shape."""
        both = self.gate_up(x)
        gate, up = both[..., : self.width], both[..., self.width :]
        down: torch.Tensor = self.down(activate(gate, self.activation).mul_(up))
        return down


def replace_linears(module: nn.Module, rounded: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """Replace every part of ``module`` for which ``rounded`` has another; routers stay as they are.

    An expert is chosen by numbers close together, from a matrix of next to no weight. Returns what takes the
    place of ``module``.
    """
    other = rounded(module)
    if other is not None:
        return other
    for name, child in module.named_children():
        if not isinstance(child, ExactRouter):
            setattr(module, name, replace_linears(child, rounded))
    return module


def rounded_to_8(module: nn.Module) -> nn.Module | None:
    """For `replace_linears`: 8-bit linears; what was rounded before stays as it is."""
    if type(module) is PackedLinear:
        return _rounded(module)
    return Int8Mlp(module) if isinstance(module, ExactMlp) else None


def _rounded(linear: PackedLinear) -> Int8Linear:
    return Int8Linear(*linear.dense(), linear.activation)
