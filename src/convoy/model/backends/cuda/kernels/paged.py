"""Compute paged attention: a softmax over keys that lie scattered in a block pool.

One program takes one tile of queries (some tokens of one row, with all query heads of one K/V head). It
walks over the tile's keys with an online softmax (FlashAttention, Dao et al. 2022) and finds each key
through the row's block table (PagedAttention, Kwon et al. 2023). A lone token has too few programs to fill
a device. Its keys are therefore split among several programs, and `combine_kernel` adds their parts up
(Flash-Decoding, Dao et al. 2023).

Exponents are powers of two: the caller multiplies scale, cap and sinks by log2(e). ``rows`` is int32
[num_rows, 5]: first token in the batch, number of tokens, position of the first token, where the row's
block table begins in ``tables``, and its number of blocks. ``tiles`` is int32 [num_tiles, 2]: the row, and
the first of its tokens. A row without tokens is padding and is skipped.
"""

from __future__ import annotations

import triton.language as tl

from convoy.model.backends.cuda.kernels.language import kernel

# Triton kernels declare every argument. With one argument a line, signatures would hide the arithmetic, so
# formatting is off.
# fmt: off


@kernel
def keys_of_program(position: tl.tensor, first: tl.tensor, num_tokens: tl.tensor, window: tl.tensor,
                    TILE_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
                    WINDOWED: tl.constexpr) -> tl.tensor:
    """Return the range [first, end) of keys for this program."""
    end = position + tl.minimum(first + TILE_TOKENS, num_tokens)
    # A zero that is a tensor: where neither branch below runs, a Python 0 would be returned as a constant.
    lowest = position * 0
    if WINDOWED:
        lowest = tl.maximum(position + first - window + 1, 0) // BLOCK_N * BLOCK_N
    if SPLITS > 1:
        # Shares are whole key blocks, so no block is read by two programs.
        share = tl.cdiv(tl.cdiv(end - lowest, BLOCK_N), SPLITS) * BLOCK_N
        lowest += tl.program_id(2) * share
        end = tl.minimum(end, lowest + share)
    return lowest, end


@kernel
def _scores(query: tl.tensor, keys: tl.tensor, place: tl.tensor, inside: tl.tensor, scale: tl.tensor,
            cap: tl.tensor, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
            CAPPED: tl.constexpr) -> tl.tensor:
    """Return the scores [BLOCK_M, BLOCK_N] of a tile of queries and the keys at ``place`` in the pool."""
    lane = tl.arange(0, HEAD_PAD)
    known = inside[None, :] & (lane < HEAD_DIM)[:, None]
    key = tl.load(keys + place[None, :] * HEAD_DIM + lane[:, None], mask=known, other=0.0)
    scores = tl.dot(query, key, input_precision="ieee") * scale
    # This is cap * tanh(x), written with the sigmoid that Triton has.
    if CAPPED:
        scores = (2.0 * tl.sigmoid(2.0 * scores) - 1.0) * cap
    return scores


@kernel
def _attend(query: tl.tensor, keys: tl.tensor, values: tl.tensor, table: tl.tensor, num_blocks: tl.tensor,
            kv_head: tl.tensor, position: tl.tensor, first: tl.tensor, end: tl.tensor, greatest: tl.tensor,
            sums: tl.tensor, scale: tl.tensor, cap: tl.tensor, window: tl.tensor, NUM_KV: tl.constexpr,
            HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
            BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAPPED: tl.constexpr,
            WINDOWED: tl.constexpr) -> tl.tensor:
    """Return the weighted values, greatest scores and sums of one tile over keys [first, end) of its row."""
    lane = tl.arange(0, VALUE_PAD)
    total = tl.zeros([BLOCK_M, VALUE_PAD], dtype=tl.float32)
    for start in range(first, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        inside = key < end
        entry = key // BLOCK_SIZE
        # A window's table may be a ring.
        if WINDOWED:
            entry = entry % num_blocks
        block = tl.load(table + entry, mask=inside, other=0).to(tl.int64)
        place = (block * NUM_KV + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE
        scores = _scores(query, keys, place, inside, scale, cap, HEAD_DIM, HEAD_PAD, CAPPED)
        visible = inside[None, :] & (key[None, :] <= position[:, None])
        if WINDOWED:
            visible = visible & (key[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(greatest, tl.max(scores, 1))
        # A query that has seen no key yet has level -inf, and -inf - -inf would be NaN.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        shares = tl.exp2(scores - level[:, None])
        # Earlier sums are rescaled to the new greatest score: the step of the online softmax.
        fade = tl.exp2(greatest - level)
        known = inside[:, None] & (lane < VALUE_DIM)[None, :]
        value = tl.load(values + place[:, None] * VALUE_DIM + lane[None, :], mask=known, other=0.0)
        total = total * fade[:, None] + tl.dot(shares.to(value.dtype), value, input_precision="ieee")
        sums = sums * fade + tl.sum(shares, 1)
        greatest = higher
    return total, greatest, sums


@kernel
def _begin(sinks: tl.tensor, head: tl.tensor, used: tl.tensor, BLOCK_M: tl.constexpr,
           SUNK: tl.constexpr) -> tl.tensor:
    """Return the greatest score and the sum before any key.

    A sink is one more key without a value, in split 0 only.
    """
    greatest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    sums = tl.zeros([BLOCK_M], dtype=tl.float32)
    if SUNK:
        sunk = used & (tl.program_id(2) == 0)
        greatest = tl.load(sinks + head, mask=sunk, other=float("-inf"))
        sums = tl.where(sunk, 1.0, 0.0)
    return greatest, sums


@kernel
def paged_attention_kernel(out: tl.tensor, parts: tl.tensor, levels: tl.tensor, query: tl.tensor,
                           keys: tl.tensor, values: tl.tensor, tables: tl.tensor, rows: tl.tensor,
                           tiles: tl.tensor, sinks: tl.tensor, scale: tl.tensor, cap: tl.tensor,
                           window: tl.tensor, query_stride: tl.tensor, NUM_KV: tl.constexpr,
                           GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
                           VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                           BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
                           CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SUNK: tl.constexpr) -> None:
    """Compute one tile of attention. Grid (tiles, K/V heads, SPLITS). ``out`` is [T, heads, VALUE_DIM].

    With splits, ``out`` is left alone and a tile is one token. Then ``parts`` [tiles, heads, SPLITS,
    VALUE_DIM] gets the weighted values, and ``levels`` [tiles, heads, SPLITS, 2] the greatest score and
    the sum, both float32.
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    row = rows + tl.load(tiles + 2 * tile) * 5
    first = tl.load(tiles + 2 * tile + 1)
    num_tokens = tl.load(row + 1)
    if first < num_tokens:
        lane, width = tl.arange(0, BLOCK_M), tl.arange(0, HEAD_PAD)
        token, head = first + lane // GROUP, kv_head * GROUP + lane % GROUP
        used = (lane < BLOCK_M // GROUP * GROUP) & (token < num_tokens)
        place = tl.load(row).to(tl.int64) + token
        at = place[:, None] * query_stride + (head * HEAD_DIM)[:, None] + width[None, :]
        tokens = tl.load(query + at, mask=used[:, None] & (width < HEAD_DIM)[None, :], other=0.0)
        start = tl.load(row + 2)
        lowest, end = keys_of_program(start, first, num_tokens, window, BLOCK_M // GROUP, BLOCK_N, SPLITS,
                                      WINDOWED)
        greatest, sums = _begin(sinks, head, used, BLOCK_M, SUNK)
        total, greatest, sums = _attend(
            tokens, keys, values, tables + tl.load(row + 3), tl.load(row + 4), kv_head, start + token,
            lowest, end, greatest, sums, scale, cap, window, NUM_KV, HEAD_DIM, HEAD_PAD, VALUE_DIM,
            VALUE_PAD, BLOCK_SIZE, BLOCK_M, BLOCK_N, CAPPED, WINDOWED)
        lane = tl.arange(0, VALUE_PAD)
        known = used[:, None] & (lane < VALUE_DIM)[None, :]
        if SPLITS == 1:
            place = (place * (NUM_KV * GROUP) + head) * VALUE_DIM
            result = (total / sums[:, None]).to(out.dtype.element_ty)
            tl.store(out + place[:, None] + lane[None, :], result, mask=known)
        else:
            part = (tile * (NUM_KV * GROUP) + head) * SPLITS + tl.program_id(2)
            tl.store(parts + part[:, None] * VALUE_DIM + lane[None, :], total, mask=known)
            tl.store(levels + 2 * part, greatest, mask=used)
            tl.store(levels + 2 * part + 1, sums, mask=used)


@kernel
def combine_kernel(out: tl.tensor, parts: tl.tensor, levels: tl.tensor, rows: tl.tensor, tiles: tl.tensor,
                   NUM_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
                   SPLITS: tl.constexpr) -> None:
    """Combine the splits of one token and head into its row of ``out``. Grid (tiles, heads)."""
    tile, head = tl.program_id(0), tl.program_id(1)
    row = rows + tl.load(tiles + 2 * tile) * 5
    if tl.load(row + 1) > 0:
        part = (tile * NUM_HEADS + head) * SPLITS + tl.arange(0, SPLITS)
        greatest = tl.load(levels + 2 * part)
        weights = tl.exp2(greatest - tl.max(greatest, 0))
        sums = tl.sum(weights * tl.load(levels + 2 * part + 1), 0)
        lane = tl.arange(0, VALUE_PAD)
        known = lane < VALUE_DIM
        found = tl.load(parts + part[:, None] * VALUE_DIM + lane[None, :], mask=known[None, :], other=0.0)
        result = tl.sum(found * weights[:, None], 0) / sums
        place = (tl.load(row).to(tl.int64) + tl.load(tiles + 2 * tile + 1)) * NUM_HEADS + head
        tl.store(out + place * VALUE_DIM + lane, result.to(out.dtype.element_ty), mask=known)
