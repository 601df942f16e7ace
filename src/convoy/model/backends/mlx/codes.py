"""Lay codes of other formats out as MLX's own, without a rounding.

A value of GPTQ, AWQ, compressed-tensors and of some types of GGUF is ``(code - zero) * scale`` or
``code * scale + minimum``. MLX's affine form is ``code * scale + bias``. The bias is ``-zero * scale``, which
is exact in float32; it and the scale stay in 16 bits where that is exact too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import torch

from convoy.model.backends.mlx.arrays import to_mlx
from convoy.model.backends.mlx.layers.matrices import CodedMatrix
from convoy.model.backends.mlx.supported import BLOCK, CENTRED, GROUPS
from convoy.model.kernels.stored.bits import stream_codes
from convoy.model.kernels.stored.matrix import GGUF, PLACES, StoredRange


@dataclass(frozen=True)
class _Affine:
    """Hold ``code * scale + bias``: codes in bytes [rows, inputs], both factors float32 [rows, groups]."""

    codes: torch.Tensor
    scales: torch.Tensor
    biases: torch.Tensor
    bits: int
    group: int


def lay_out(one: StoredRange, dtype: mx.Dtype) -> CodedMatrix:
    """Return the same matrix in MLX's affine form, with factors in ``dtype`` if that is float32."""
    if one.form in BLOCKS:
        width, lay = BLOCKS[one.form]
        found = lay(one.parts["stored"].reshape(one.outputs, one.inputs // width, -1))
    else:
        found = _centred(one)
    scales, biases = found.scales, found.biases
    exact = next(
        (half for half in (torch.float16, torch.bfloat16) if _fits(scales, half) and _fits(biases, half)),
        None,
    )
    if exact is not None and dtype != mx.float32:
        scales, biases = scales.to(exact), biases.to(exact)
    codes = _packed(found.codes, found.bits)
    return CodedMatrix(to_mlx(codes), to_mlx(scales), to_mlx(biases), found.group, found.bits, "affine")


def _fits(numbers: torch.Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(numbers.to(dtype).to(torch.float32), numbers)


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes in bytes [rows, inputs] as words, uint32 [rows, inputs * bits / 32], first ones lowest."""
    per_byte = 8 // bits
    apart = codes.reshape(len(codes), -1, per_byte).to(torch.uint8)
    joined = apart[..., 0].clone()
    for place in range(1, per_byte):
        joined |= apart[..., place] << (bits * place)
    return joined.contiguous().view(torch.uint32)


def _centred(one: StoredRange) -> _Affine:
    assert PLACES not in one.parts, "`weights` refuses them"
    bits = CENTRED[one.form]
    codes = stream_codes(one.parts["codes"], bits)[:, : one.inputs]
    scales, zeros = one.parts["scales"].to(torch.float32), one.parts.get("zeros")
    half = float(1 << (bits - 1)) if zeros is None or zeros.dtype == torch.int8 else 0.0
    biases = -(half + (0 if zeros is None else zeros.to(torch.float32))) * scales
    group = min(one.group or one.inputs, one.inputs)
    size = next(size for size in GROUPS if group % size == 0 == one.inputs % size)
    scales, biases = (
        each.expand(one.outputs, -1).repeat_interleave(group // size, 1)[:, : one.inputs // size].contiguous()
        for each in (scales, biases)
    )
    return _Affine(codes, scales, biases, bits, size)


def _half(blocks: torch.Tensor, place: int) -> torch.Tensor:
    """Return the half at a place of each block, float32 [rows, blocks]."""
    return blocks[..., place : place + 2].contiguous().view(torch.float16)[..., 0].to(torch.float32)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return codes in ggml's order, [rows, inputs]: the lower halves of a block's bytes come first."""
    return torch.cat((packed & 15, packed >> 4), -1).flatten(1)


def _q4_0(blocks: torch.Tensor) -> _Affine:
    scales = _half(blocks, 0)
    return _Affine(_nibbles(blocks[..., 2:]), scales, -8 * scales, 4, BLOCK)


def _q4_1(blocks: torch.Tensor) -> _Affine:
    return _Affine(_nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2), 4, BLOCK)


def _q8_0(blocks: torch.Tensor) -> _Affine:
    scales = _half(blocks, 0)
    codes = blocks[..., 2:].contiguous().view(torch.int8).to(torch.int16) + 128
    return _Affine(codes.to(torch.uint8).flatten(1), scales, -128 * scales, 8, BLOCK)


def _q4_k(blocks: torch.Tensor) -> _Affine:
    """Lay out eight groups of a block: 6-bit scales and minima, each times a half of the block.

    Their products have up to 17 bits, so they are held in float32.
    """
    packed = blocks[..., 4:16].to(torch.int32)
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), -1)
    minima = torch.cat((middle & 63, (high >> 4) | (middle >> 6 << 4)), -1)
    # 32 bytes hold two groups, the first one in the lower halves.
    pairs = blocks[..., 16:].reshape(*blocks.shape[:2], 4, BLOCK)
    codes = torch.stack((pairs & 15, pairs >> 4), -2).flatten(1)
    return _Affine(
        codes,
        (_half(blocks, 0)[..., None] * scales).flatten(1),
        (-_half(blocks, 2)[..., None] * minima).flatten(1),
        4,
        BLOCK,
    )


# By the form in `supported.BLOCK_FORMS`, with the inputs of a block.
BLOCKS: dict[str, tuple[int, Callable[[torch.Tensor], _Affine]]] = {
    f"{GGUF}Q4_0": (BLOCK, _q4_0),
    f"{GGUF}Q4_1": (BLOCK, _q4_1),
    f"{GGUF}Q8_0": (BLOCK, _q8_0),
    f"{GGUF}Q4_K": (8 * BLOCK, _q4_k),
}
