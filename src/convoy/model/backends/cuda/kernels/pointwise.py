"""Run the steps between a layer's matrix products, each in one pass over memory: norms, rotation, gates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from convoy.model.backends.cuda.kernels.attention import DeviceHeadShape, Pool
from convoy.model.backends.cuda.kernels.float8 import RoundedRows, num_warps_of, round_rows, store_rounded
from convoy.model.backends.cuda.kernels.language import kernel, next_power

_GATE_BLOCK = 1024


@dataclass(frozen=True)
class Rotation:
    """Hold cos and sin of every position, float32 [max_context, head_dim / 2]."""

    cos: torch.Tensor
    sin: torch.Tensor


def add_norm(x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add ``delta`` to ``x`` [T, width] in place, and return its RMS norm."""
    out = torch.empty_like(x)
    width = x.shape[1]
    add_norm_kernel[x.shape[0],](
        out, x, x if delta is None else delta, weight, eps, WIDTH=width, PAD=next_power(width),
        ADDS=delta is not None, num_warps=8 if width >= 2048 else 4,
    )  # fmt: skip
    return out


def add_norm_rounded(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> RoundedRows:
    """Return the norm of `add_norm`, rounded to floats of 8 bits."""
    if not x.is_cuda:
        return round_rows(add_norm(x, delta, weight, eps))
    num_rows, width = x.shape
    found = RoundedRows.empty(num_rows, width, x)
    pad = next_power(width)
    add_norm_rounded_kernel[num_rows,](
        found.codes, found.scales, x, x if delta is None else delta, weight, eps, WIDTH=width, PAD=pad,
        ADDS=delta is not None, num_warps=num_warps_of(pad),
    )  # fmt: skip
    return found


def gate_rounded(both: torch.Tensor) -> RoundedRows:
    """Return the products of `gate`, rounded to floats of 8 bits."""
    if not both.is_cuda:
        return round_rows(gate(both))
    width = both.shape[1] // 2
    found, pad = RoundedRows.empty(both.shape[0], width, both), next_power(width)
    gate_rounded_kernel[both.shape[0],](
        found.codes, found.scales, both, WIDTH=width, PAD=pad, num_warps=num_warps_of(pad)
    )
    return found


def gate(both: torch.Tensor) -> torch.Tensor:
    """Return silu(first half) * second half: [T, 2 * width] to [T, width]."""
    width = both.shape[1] // 2
    out = both.new_empty(both.shape[0], width)
    gate_kernel[both.shape[0], -(-width // _GATE_BLOCK)](out, both, WIDTH=width, BLOCK=_GATE_BLOCK)
    return out


def rotate_and_store(
    qkv: torch.Tensor,
    pool: Pool,
    shape: DeviceHeadShape,
    rotation: Rotation,
    *,
    positions: torch.Tensor,
    slots: torch.Tensor,
    norms: torch.Tensor | None,
    eps: float,
) -> None:
    """Normalise (Qwen3) and rotate q and k of ``qkv`` [T, (heads + 2 * kv_heads) * head_dim].

    q is written back in place. k and v go into the pool at ``slots`` int32 [T] (block * block_size +
    offset; -1 writes nothing). ``norms`` is [2, head_dim]: the weights for q and for k. Values are as wide
    as keys here.
    """
    half = shape.head_dim // 2
    rotate_and_store_kernel[qkv.shape[0], shape.num_heads + 2 * shape.num_kv_heads](
        qkv, pool.keys, pool.values, rotation.cos, rotation.sin, positions, slots,
        qkv if norms is None else norms, eps, qkv.stride(0), NUM_HEADS=shape.num_heads,
        NUM_KV=shape.num_kv_heads, HALF=half, HALF_PAD=next_power(half), BLOCK_SIZE=shape.block_size,
        NORMED=norms is not None, num_warps=1,
    )  # fmt: skip


def store(
    keys: torch.Tensor, values: torch.Tensor, pool: Pool, shape: DeviceHeadShape, slots: torch.Tensor
) -> None:
    """Store K [T, kv_heads, head_dim] and V [.., value_dim] in the pool, as `rotate_and_store` does."""
    store_rows(keys, pool.keys, shape.block_size, slots)
    store_rows(values, pool.values, shape.block_size, slots)


def store_rows(found: torch.Tensor, blocks: torch.Tensor, block_size: int, slots: torch.Tensor) -> None:
    """Store [T, heads, width] in the pool ``blocks`` [num_blocks, heads, block_size, width]."""
    rows = found.contiguous()
    num_heads, width = rows.shape[1:]
    store_kernel[rows.shape[0], num_heads](
        blocks, rows, slots, NUM_KV=num_heads, WIDTH=width, PAD=next_power(width), BLOCK_SIZE=block_size,
        num_warps=1,
    )  # fmt: skip


# fmt: off


@kernel
def store_kernel(pool: tl.tensor, rows: tl.tensor, slots: tl.tensor, NUM_KV: tl.constexpr,
                 WIDTH: tl.constexpr, PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr) -> None:
    """Store one head of one token in the pool. Grid (T, K/V heads)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, PAD)
    slot = tl.load(slots + token).to(tl.int64)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    at = ((block * NUM_KV + head) * BLOCK_SIZE + offset) * WIDTH + lane
    row = tl.load(rows + (token * NUM_KV + head) * WIDTH + lane, mask=lane < WIDTH, other=0.0)
    tl.store(pool + at, row.to(pool.dtype.element_ty), mask=(lane < WIDTH) & (slot >= 0))


@kernel
def add_norm_kernel(out: tl.tensor, x: tl.tensor, delta: tl.tensor, weight: tl.tensor, eps: tl.tensor,
                    WIDTH: tl.constexpr, PAD: tl.constexpr, ADDS: tl.constexpr) -> None:
    """Add and normalise one row. Grid (T,)."""
    lane = tl.arange(0, PAD)
    known = lane < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + lane
    scaled = _added_norm(x, delta, weight, eps, at, lane, known, WIDTH, ADDS)
    tl.store(out + at, scaled.to(out.dtype.element_ty), mask=known)


@kernel
def add_norm_rounded_kernel(codes: tl.tensor, scales: tl.tensor, x: tl.tensor, delta: tl.tensor,
                            weight: tl.tensor, eps: tl.tensor, WIDTH: tl.constexpr, PAD: tl.constexpr,
                            ADDS: tl.constexpr) -> None:
    """Add, normalise and round one row. Grid (T,)."""
    lane = tl.arange(0, PAD)
    known = lane < WIDTH
    number = tl.program_id(0).to(tl.int64)
    scaled = _added_norm(x, delta, weight, eps, number * WIDTH + lane, lane, known, WIDTH, ADDS)
    store_rounded(codes, scales, scaled, number, lane, known, WIDTH)


@kernel
def _added_norm(x: tl.tensor, delta: tl.tensor, weight: tl.tensor, eps: tl.tensor, at: tl.tensor,
                lane: tl.tensor, known: tl.tensor, WIDTH: tl.constexpr, ADDS: tl.constexpr) -> tl.tensor:
    """Add ``delta`` to a row in place, and return its norm as float32."""
    row = tl.load(x + at, mask=known, other=0.0).to(tl.float32)
    if ADDS:
        row += tl.load(delta + at, mask=known, other=0.0).to(tl.float32)
        # Normalise the rounded sum: the next layer reads the same rounded value.
        rounded = row.to(x.dtype.element_ty)
        tl.store(x + at, rounded, mask=known)
        row = rounded.to(tl.float32)
    spread = tl.rsqrt(tl.sum(row * row, 0) / WIDTH + eps)
    return row * spread * tl.load(weight + lane, mask=known, other=0.0).to(tl.float32)


@kernel
def gate_rounded_kernel(codes: tl.tensor, scales: tl.tensor, both: tl.tensor, WIDTH: tl.constexpr,
                        PAD: tl.constexpr) -> None:
    """Gate and round one row. Grid (T,)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, PAD)
    known = lane < WIDTH
    gates = tl.load(both + row * 2 * WIDTH + lane, mask=known, other=0.0).to(tl.float32)
    ups = tl.load(both + (row * 2 + 1) * WIDTH + lane, mask=known, other=0.0).to(tl.float32)
    store_rounded(codes, scales, gates * tl.sigmoid(gates) * ups, row, lane, known, WIDTH)


@kernel
def gate_kernel(out: tl.tensor, both: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Gate one block of a row. Grid (T, WIDTH / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = lane < WIDTH
    gates = tl.load(both + row * 2 * WIDTH + lane, mask=known, other=0.0).to(tl.float32)
    ups = tl.load(both + (row * 2 + 1) * WIDTH + lane, mask=known, other=0.0).to(tl.float32)
    found = gates * tl.sigmoid(gates) * ups
    tl.store(out + row * WIDTH + lane, found.to(out.dtype.element_ty), mask=known)


@kernel
def rotate_and_store_kernel(qkv: tl.tensor, keys: tl.tensor, values: tl.tensor, cos: tl.tensor,
                            sin: tl.tensor, positions: tl.tensor, slots: tl.tensor, norms: tl.tensor,
                            eps: tl.tensor, stride: tl.tensor, NUM_HEADS: tl.constexpr,
                            NUM_KV: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
                            BLOCK_SIZE: tl.constexpr, NORMED: tl.constexpr) -> None:
    """Rotate or store one head of one token. Grid (T, query heads, then key heads, then value heads)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, HALF_PAD)
    known = lane < HALF
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV)
    is_value = head >= NUM_HEADS + NUM_KV
    first = qkv + token * stride + head * (2 * HALF) + lane
    x = tl.load(first, mask=known, other=0.0).to(tl.float32)
    y = tl.load(first + HALF, mask=known, other=0.0).to(tl.float32)
    place = tl.load(positions + token).to(tl.int64) * HALF + lane
    # Values are not rotated: cos 1 and sin 0 leave them unchanged without a branch.
    c = tl.where(is_value, 1.0, tl.load(cos + place, mask=known, other=0.0))
    s = tl.where(is_value, 0.0, tl.load(sin + place, mask=known, other=0.0))
    if NORMED:
        spread = tl.rsqrt((tl.sum(x * x, 0) + tl.sum(y * y, 0)) / (2 * HALF) + eps)
        weight = norms + tl.where(is_key, 2 * HALF, 0) + lane
        x = tl.where(is_value, x, x * spread * tl.load(weight, mask=known, other=0.0).to(tl.float32))
        y = tl.where(is_value, y, y * spread * tl.load(weight + HALF, mask=known, other=0.0).to(tl.float32))
    turned = (x * c - y * s).to(qkv.dtype.element_ty)
    other = (y * c + x * s).to(qkv.dtype.element_ty)
    slot = tl.load(slots + token).to(tl.int64)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    kv_head = head - NUM_HEADS - tl.where(is_value, NUM_KV, 0)
    at = ((block * NUM_KV + kv_head) * BLOCK_SIZE + offset) * (2 * HALF) + lane
    if head < NUM_HEADS:
        tl.store(first, turned, mask=known)
        tl.store(first + HALF, other, mask=known)
    tl.store(keys + at, turned, mask=known & is_key & (slot >= 0))
    tl.store(keys + at + HALF, other, mask=known & is_key & (slot >= 0))
    tl.store(values + at, turned, mask=known & is_value & (slot >= 0))
    tl.store(values + at + HALF, other, mask=known & is_value & (slot >= 0))
