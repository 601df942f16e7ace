"""Attend over latents in a block pool: one row a token, for all heads, as `model.layers.latent` makes them.

All heads of a token meet the same rows, so they are the rows of one tile. A tile has at most 64 of them,
because its sums are as wide as a latent: more heads are several parts, each with a program of its own. The
first part of a row is key and value at once, and is read once for both. Otherwise the kernel works as those
of `kernels.paged`, which explains ``rows`` and ``tiles`` ("FlashMLA", DeepSeek, 2025, has the same idea).
"""

from __future__ import annotations

import torch
import triton.language as tl

from convoy.model.backends.cuda.kernels.attention import LOG2_E, DeviceHeadShape, Launch, make_parts
from convoy.model.backends.cuda.kernels.language import kernel, next_power
from convoy.model.backends.cuda.kernels.paged import combine_kernel, keys_of_program

# Rows of a tile: heads of a token.
MAX_PART = 64
# The least number of rows, columns and depth of a matrix product in Triton.
_LEAST = 16
# Keys of one step of the online softmax, and the bytes of one that fit twice into a multiprocessor's memory.
_MAX_KEYS = 64
_KEY_BYTES = 36 << 10


def num_parts(num_heads: int) -> int:
    """Return the least number of equal parts of ``num_heads`` with at most `MAX_PART` heads each."""
    return next(n for n in range(1, num_heads + 1) if num_heads % n == 0 and num_heads // n <= MAX_PART)


def attend_latents(
    query: torch.Tensor,
    pool: torch.Tensor,
    shape: DeviceHeadShape,
    *,
    tables: torch.Tensor,
    rows: torch.Tensor,
    launches: tuple[Launch, ...],
) -> torch.Tensor:
    """Return the attention [T, num_heads, value_dim] of ``query`` [T, num_heads, head_dim].

    ``pool`` [num_blocks, 1, block_size, head_dim] already holds the rows of these tokens. The K/V heads of
    ``shape`` are parts of the query heads. The other arguments are those of `kernels.attention.attend`.
    """
    query = query.contiguous()
    out = query.new_empty(query.shape[0], shape.num_heads, shape.value_dim)
    turned = shape.head_dim - shape.value_dim
    pad, turned_pad = next_power(shape.value_dim, _LEAST), next_power(turned, _LEAST)
    fitting = _KEY_BYTES // (pool.element_size() * (pad + turned_pad))
    for launch in launches:
        num_tiles, splits = launch.tiles.shape[0], launch.num_splits
        # Triton wants a pointer for every argument. Without splits the kernel never reads these.
        parts, levels = (rows, rows) if splits == 1 else make_parts(query, launch, shape)
        latent_attention_kernel[num_tiles, shape.num_kv_heads, splits](
            *(out, parts, levels, query, pool, tables, rows, launch.tiles),
            scale=shape.scale * LOG2_E,
            window=shape.window or 0,
            NUM_PARTS=shape.num_kv_heads,
            GROUP=shape.group,
            LATENT=shape.value_dim,
            LATENT_PAD=pad,
            TURNED=turned,
            TURNED_PAD=turned_pad,
            BLOCK_SIZE=shape.block_size,
            BLOCK_M=launch.block_rows,
            BLOCK_N=max(_LEAST, min(_MAX_KEYS, next_power(fitting + 1) // 2)),
            SPLITS=splits,
            WINDOWED=shape.window is not None,
            num_warps=8 if pad >= 256 else 4,
            num_stages=2 if pool.element_size() == 2 else 1,
        )
        if splits > 1:
            combine_kernel[num_tiles, shape.num_heads](
                *(out, parts, levels, rows, launch.tiles),
                NUM_HEADS=shape.num_heads,
                VALUE_DIM=shape.value_dim,
                VALUE_PAD=pad,
                SPLITS=splits,
            )
    return out


# fmt: off


@kernel
def _attend_tile(query: tl.tensor, turned: tl.tensor, pool: tl.tensor, table: tl.tensor,
                 num_blocks: tl.tensor, position: tl.tensor, first: tl.tensor, end: tl.tensor,
                 scale: tl.tensor, window: tl.tensor, LATENT: tl.constexpr, LATENT_PAD: tl.constexpr,
                 TURNED: tl.constexpr, TURNED_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr) -> tl.tensor:
    """Return the weighted latents, greatest scores and sums of one tile over keys [first, end) of its row."""
    lane, other = tl.arange(0, LATENT_PAD), tl.arange(0, TURNED_PAD)
    total = tl.zeros([BLOCK_M, LATENT_PAD], dtype=tl.float32)
    greatest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    sums = tl.zeros([BLOCK_M], dtype=tl.float32)
    for start in range(first, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        inside = key < end
        entry = key // BLOCK_SIZE
        # A window's table may be a ring.
        if WINDOWED:
            entry = entry % num_blocks
        block = tl.load(table + entry, mask=inside, other=0).to(tl.int64)
        # Multiplied before they are added: Triton takes the sum itself for a multiple of BLOCK_SIZE, and
        # would read 16 bytes at once from rows that begin between them.
        place = block * (BLOCK_SIZE * (LATENT + TURNED)) + key % BLOCK_SIZE * (LATENT + TURNED)
        latent = tl.load(pool + place[:, None] + lane[None, :],
                         mask=inside[:, None] & (lane < LATENT)[None, :], other=0.0)
        key_turned = tl.load(pool + place[None, :] + LATENT + other[:, None],
                             mask=inside[None, :] & (other < TURNED)[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(turned, key_turned, scores, input_precision="ieee") * scale
        visible = inside[None, :] & (key[None, :] <= position[:, None])
        if WINDOWED:
            visible = visible & (key[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(greatest, tl.max(scores, 1))
        # A query that has seen no key yet has level -inf, and -inf - -inf would be NaN.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        shares = tl.exp2(scores - level[:, None])
        fade = tl.exp2(greatest - level)
        total = total * fade[:, None] + tl.dot(shares.to(latent.dtype), latent, input_precision="ieee")
        sums = sums * fade + tl.sum(shares, 1)
        greatest = higher
    return total, greatest, sums


@kernel
def latent_attention_kernel(out: tl.tensor, parts: tl.tensor, levels: tl.tensor, query: tl.tensor,
                            pool: tl.tensor, tables: tl.tensor, rows: tl.tensor, tiles: tl.tensor,
                            scale: tl.tensor, window: tl.tensor, NUM_PARTS: tl.constexpr,
                            GROUP: tl.constexpr, LATENT: tl.constexpr, LATENT_PAD: tl.constexpr,
                            TURNED: tl.constexpr, TURNED_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                            BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
                            WINDOWED: tl.constexpr) -> None:
    """Compute one tile of attention. Grid (tiles, parts of the heads, SPLITS).

    ``out`` is [T, heads, LATENT], and ``parts`` and ``levels`` are as in `paged.paged_attention_kernel`.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    row = rows + tl.load(tiles + 2 * tile) * 5
    first = tl.load(tiles + 2 * tile + 1)
    num_tokens = tl.load(row + 1)
    if first < num_tokens:
        line = tl.arange(0, BLOCK_M)
        token, head = first + line // GROUP, part * GROUP + line % GROUP
        used = (line < BLOCK_M // GROUP * GROUP) & (token < num_tokens)
        of_token = (tl.load(row).to(tl.int64) + token) * (NUM_PARTS * GROUP)
        place = of_token + head
        lane, other = tl.arange(0, LATENT_PAD), tl.arange(0, TURNED_PAD)
        own = query + (of_token * (LATENT + TURNED) + head * (LATENT + TURNED))[:, None]
        latents = tl.load(own + lane[None, :], mask=used[:, None] & (lane < LATENT)[None, :], other=0.0)
        turned = tl.load(own + LATENT + other[None, :], mask=used[:, None] & (other < TURNED)[None, :],
                         other=0.0)
        start = tl.load(row + 2)
        lowest, end = keys_of_program(start, first, num_tokens, window, BLOCK_M // GROUP, BLOCK_N, SPLITS,
                                      WINDOWED)
        total, greatest, sums = _attend_tile(
            latents, turned, pool, tables + tl.load(row + 3), tl.load(row + 4), start + token, lowest, end,
            scale, window, LATENT, LATENT_PAD, TURNED, TURNED_PAD, BLOCK_SIZE, BLOCK_M, BLOCK_N, WINDOWED)
        known = used[:, None] & (lane < LATENT)[None, :]
        if SPLITS == 1:
            result = (total / sums[:, None]).to(out.dtype.element_ty)
            tl.store(out + place[:, None] * LATENT + lane[None, :], result, mask=known)
        else:
            at = (tile * (NUM_PARTS * GROUP) + head) * SPLITS + tl.program_id(2)
            tl.store(parts + at[:, None] * LATENT + lane[None, :], total, mask=known)
            tl.store(levels + 2 * at, greatest, mask=used)
            tl.store(levels + 2 * at + 1, sums, mask=used)
