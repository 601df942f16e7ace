"""Find codes and scales of a matrix by a search over weighted error.

A value is a code times the scale of its group: 32 consecutive inputs of one output. The search starts from
several scales and takes the two steps of Lloyd ("Least squares quantization in PCM", 1982): the nearest codes
of a scale, and then the scale of least squares of these codes. Inputs that count more are weighted more, as
in GPTQ (Frantar et al., 2022), AWQ (Lin et al., 2023) and llama.cpp's importance matrices. These weigh by
activations of a calibration text. Without one, an input's weight is the mean square of its column.

Members of a cluster round the same weights by themselves. So every sum has an order of its own here, which
depends neither on the processor nor on the number of threads. Compiled code (`rounding.c`) is compared with
torch's operators, and searches where its bits are theirs.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from convoy.model.kernels.native.choice import choose_library
from convoy.model.kernels.native.library import NativeLibrary, RoundingStruct

# inputs that share a scale
GROUP = 32
# codes onto which the first scales map the value of greatest magnitude; beyond the last code it is cut off
_REACHES = {4: (6.5, 7.0, 7.5, 8.0, 8.5, 9.0, 10.0), 8: (124.0, 126.0, 127.0, 128.0)}
# the dtype of scales: it has the range of float32, and other programs hold scales in the model's own 16 bits
_SCALES = torch.bfloat16
# a group with a smaller scale becomes zeros: the scale would lose its bits
_LEAST_SCALE = 1e-30
# numbers rounded at a time: intermediate values fit the processor's cache
_PIECE_ELEMENTS = 1 << 18
# the same on a CUDA device, which is occupied by as many
_DEVICE_ELEMENTS = 1 << 23
# of the check of compiled code: more groups than a vector has lanes
_SAMPLE_OUTPUTS, _SAMPLE_INPUTS = 24, 37 * GROUP


class Rows(Protocol):
    """Give the rows of a matrix [outputs, inputs]: a tensor, or one that unpacks the rows asked for."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the numbers of outputs and inputs."""
        ...

    def __getitem__(self, rows: slice | torch.Tensor) -> torch.Tensor:
        """Return some rows, of any floating-point dtype."""
        ...


@dataclass(frozen=True, eq=False)
class RoundedMatrix:
    """Hold codes, int8 [outputs, inputs], and scales, bfloat16 [outputs, groups], and their errors.

    ``square`` is the weighted sum of the squares of the values. ``error`` is that of the differences from
    them, and ``nearest_error`` that of rounding to the nearest: the greatest magnitude of a group at the last
    code, and no search.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    square: float = 0.0
    error: float = 0.0
    nearest_error: float = 0.0

    def values(self) -> torch.Tensor:
        """Return the values that codes and scales stand for, float32 [outputs, inputs]."""
        spread = self.scales.to(torch.float32).repeat_interleave(GROUP, 1)
        return self.codes.to(torch.float32).mul_(spread)

    def packed(self, bits: int) -> torch.Tensor:
        """Return the codes as compressed-tensors packs them, int32 [outputs, inputs * bits / 32].

        Half of the codes' range is added to each, and the first code is in the lowest bits.
        """
        codes = self.codes.to(torch.int16).add_(1 << (bits - 1)).to(torch.uint8)
        if bits == 4:
            codes = codes[:, ::2] | (codes[:, 1::2] << 4)
        return codes.contiguous().view(torch.int32)


def round_matrix(matrix: torch.Tensor, bits: int, weights: torch.Tensor | None = None) -> RoundedMatrix:
    """Round [outputs, inputs] of any floating-point dtype to ``bits``, 4 or 8; inputs fill whole groups.

    ``weights`` [inputs] say how much the errors of each input count; the default is `input_weights`. No group
    has a greater weighted error than rounding to the nearest gives it. A matrix with a value that is not
    finite has an error that is not finite.
    """
    weights = input_weights(matrix) if weights is None else weights
    # Groups are rounded by themselves, so the number of rows at a time changes no code.
    elements = _DEVICE_ELEMENTS if isinstance(matrix, torch.Tensor) and matrix.is_cuda else _PIECE_ELEMENTS
    found = [_round(rows, weights, bits) for rows in _row_pieces(matrix, elements)]
    return RoundedMatrix(
        torch.cat([one.codes for one in found]),
        torch.cat([one.scales for one in found]),
        sum(one.square for one in found),
        sum(one.error for one in found),
        sum(one.nearest_error for one in found),
    )


def input_weights(matrix: Rows) -> torch.Tensor:
    """Return the mean square of each column of [outputs, inputs], float32 [inputs], scaled to a mean of 1.

    The weights of a matrix of zeros are 1.
    """
    sums = torch.zeros(matrix.shape[1], dtype=torch.float64)
    for rows in _row_pieces(matrix):
        sums = sums.to(rows.device)
        sums += _halved_sum(rows.square_().to(torch.float64))
    mean = math.fsum(sums.tolist()) / len(sums)
    return torch.ones(len(sums)) if mean == 0.0 else (sums / mean).to(torch.float32)


def _row_pieces(matrix: Rows, elements: int = _PIECE_ELEMENTS) -> Iterator[torch.Tensor]:
    """Yield copies of the rows as float32, about ``elements`` numbers at a time."""
    outputs, inputs = matrix.shape
    step = max(1, elements // max(1, inputs))
    for start in range(0, outputs, step):
        yield matrix[start : start + step].to(torch.float32, copy=True)


def _halved_sum(values: torch.Tensor) -> torch.Tensor:
    """Return the sums over the first dimension, in the memory of ``values``.

    Both halves are added number by number until one number is left. An odd one waits for the next round.
    """
    length = len(values)
    while length > 1:
        half = length // 2
        values[:half].add_(values[half : 2 * half])
        if length % 2:
            values[half].copy_(values[length - 1])
        length = half + length % 2
    return values[0]


def _round(rows: torch.Tensor, weights: torch.Tensor, bits: int) -> RoundedMatrix:
    library = None if rows.is_cuda else rounding_library(bits)
    if library is None:
        return round_by_torch(rows, weights, bits)
    return round_by_library(library, rows, weights, bits)


@functools.cache
def rounding_library(bits: int, offered: tuple[NativeLibrary, ...] | None = None) -> NativeLibrary | None:
    """Return the compiled code that rounds a sample to ``bits`` as torch's operators do, or None.

    ``offered`` is as `choose_library` takes it.
    """
    return choose_library("rounding", functools.partial(_holds, bits), offered)


def _holds(bits: int, library: NativeLibrary) -> bool:
    rows = rounding_sample()
    weights = torch.linspace(0.5, 1.5, rows.shape[1])
    pairs = zip(*(_tensors(way(rows, weights, bits)) for way in _ways(library)), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def rounding_sample() -> torch.Tensor:
    """Return float32 rows [outputs, inputs] with groups of all magnitudes, of zeros, and with one outlier."""
    generator = torch.Generator().manual_seed(20)
    rows = torch.randn(_SAMPLE_OUTPUTS, _SAMPLE_INPUTS, generator=generator)
    # Denormal numbers, small scales that become 1, and large numbers with squares that float32 still holds.
    powers = torch.linspace(-45, 15, _SAMPLE_OUTPUTS // 2, dtype=torch.float64)
    rows[: len(powers)] = (rows[: len(powers)] * 10 ** powers[:, None]).to(torch.float32)
    # Small numbers: many groups have codes that lie half-way.
    rows[-4:] = (rows[-4:] * 3).round() / 8
    groups = rows.view(_SAMPLE_OUTPUTS, -1, GROUP)
    groups[:, 0], groups[:, 1, 1:], groups[:, 2, 5] = 0.0, 0.0, 1000.0
    groups[:, 3], groups[:, 4] = -groups[:, 3].abs(), groups[:, 4, :1]
    return rows


def _ways(library: NativeLibrary) -> tuple[Callable[..., RoundedMatrix], ...]:
    return round_by_torch, functools.partial(round_by_library, library)


def _tensors(found: RoundedMatrix) -> Sequence[torch.Tensor]:
    errors = torch.tensor([found.square, found.error, found.nearest_error], dtype=torch.float64)
    return found.codes, found.scales, errors


def round_by_library(
    library: NativeLibrary, rows: torch.Tensor, weights: torch.Tensor, bits: int
) -> RoundedMatrix:
    """Return what `round_by_torch` does, by compiled code."""
    rows, weights = rows.contiguous(), weights.to(torch.float32).contiguous()
    outputs, inputs = rows.shape
    groups = outputs, inputs // GROUP
    codes, scales = torch.empty(outputs, inputs, dtype=torch.int8), torch.empty(groups, dtype=_SCALES)
    sums = torch.empty(3, *groups)
    reaches = _REACHES[bits]
    struct = RoundingStruct(
        *(rows.data_ptr(), weights.data_ptr(), scales.data_ptr()),
        *(one.data_ptr() for one in sums),
        *(outputs, inputs, bits, len(reaches), (ctypes.c_float * 8)(*reaches)),
    )
    library.convoy_round(ctypes.byref(struct), codes.data_ptr(), torch.get_num_threads())
    return RoundedMatrix(codes, scales, *(float(one.sum(dtype=torch.float64)) for one in sums))


def round_by_torch(rows: torch.Tensor, weights: torch.Tensor, bits: int) -> RoundedMatrix:
    """Round float32 rows [outputs, inputs] with ``weights`` [inputs], by torch's operators.

    Each group has the better of two choices: the nearest codes without a search, and with it.
    """
    # The inputs of a group come first, so that all steps run over long rows: [GROUP, outputs, groups].
    groups = rows.reshape(len(rows), -1, GROUP).permute(2, 0, 1).contiguous()
    weighs = weights.to(rows.device).view(-1, GROUP).T.unsqueeze(1).contiguous()
    plain = _safe(_divided(groups.abs().amax(0), (1 << (bits - 1)) - 1)).to(_SCALES)
    best = _safe(_search(groups, weighs, bits)).to(_SCALES)
    codes = [_nearest(groups, scales.to(torch.float32), bits) for scales in (plain, best)]
    errors = [
        _halved_sum((own * scales.to(torch.float32)).sub_(groups).square_().mul_(weighs))
        for own, scales in zip(codes, (plain, best), strict=True)
    ]
    is_better = errors[1] < errors[0]
    sums = _halved_sum(groups.square() * weighs), torch.where(is_better, errors[1], errors[0]), errors[0]
    return RoundedMatrix(
        torch.where(is_better, codes[1], codes[0]).to(torch.int8).permute(1, 2, 0).flatten(1),
        torch.where(is_better, best, plain),
        *(float(one.sum(dtype=torch.float64)) for one in sums),
    )


def _search(groups: torch.Tensor, weighs: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the scale of least squares for the best codes of all first scales, [outputs, groups]."""
    weighted = groups * weighs
    # memory for all rounds: fresh pages would take longer than the sums
    codes, products = torch.empty_like(groups), torch.empty_like(groups)
    most, least = groups.amax(0), groups.amin(0)
    greatest = torch.where(most >= -least, most, least)
    best, best_gain = torch.zeros_like(greatest), torch.zeros_like(greatest)
    for reach in _REACHES[bits]:
        # the sign puts the greatest magnitude on the negative side, which has one code more
        _nearest(groups, _safe(_divided(greatest, -reach)), bits, out=codes)
        cross = _halved_sum(torch.mul(weighted, codes, out=products))
        power = _halved_sum(codes.square_().mul_(weighs))
        # the scale cross / power leaves the weighted square of the values less this
        gain = torch.where(power > 0, cross.square() / power, 0)
        is_better = gain > best_gain
        best = torch.where(is_better, cross / power, best)
        best_gain = torch.where(is_better, gain, best_gain)
    return best


def _nearest(
    groups: torch.Tensor, scales: torch.Tensor, bits: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    half = 1 << (bits - 1)
    return torch.div(groups, scales, out=out).round_().clamp_(-half, half - 1)


def _divided(numbers: torch.Tensor, divisor: float) -> torch.Tensor:
    """Return the quotients, each rounded once: CUDA multiplies by the reciprocal of a plain number."""
    return numbers / torch.full_like(numbers, divisor)


def _safe(scales: torch.Tensor) -> torch.Tensor:
    """Return 1 in place of scales that are too small to divide by."""
    return torch.where(scales.abs() > _LEAST_SCALE, scales, 1)
