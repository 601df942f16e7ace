"""Generate synthetic weights on the device: the same numbers as `synthetic.draw_tensor`, rounded.

NumPy's Philox is Philox4x64-10 (Salmon et al. 2011). A counter from 1 and the key give four 64-bit draws.
Each draw gives two numbers here, the lower half first. So a CPU member and a CUDA member hold the same
model.
"""

from __future__ import annotations

import torch
import triton.language as tl

from convoy.model.backends.cuda.kernels.language import kernel

# Counters of one program, with eight numbers each.
_BLOCK = 256


def draw_into(out: torch.Tensor, key: int, scale: float) -> None:
    """Fill contiguous ``out`` with the 32-bit numbers of the 128-bit ``key``, times ``scale``."""
    keys = [_signed(key & (2**64 - 1)), _signed(key >> 64)]
    halves = torch.tensor(keys, dtype=torch.int64, device=out.device)
    count = out.numel()
    draw_kernel[-(-count // (8 * _BLOCK)),](out, halves, count, scale, BLOCK=_BLOCK)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


# fmt: off


@kernel
def draw_kernel(out: tl.tensor, key: tl.tensor, count: tl.tensor, scale: tl.tensor,
                BLOCK: tl.constexpr) -> None:
    """Generate eight numbers for each counter. Grid (count / (8 * BLOCK),)."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    low, high = tl.load(key).to(tl.uint64, bitcast=True), tl.load(key + 1).to(tl.uint64, bitcast=True)
    a = (index + 1).to(tl.uint64)
    b, c, d = a * 0, a * 0, a * 0
    # Broadcast the two key words to vectors.
    low, high = low + b, high + b
    times_a = tl.full([BLOCK], 0xD2E7470EE14C6C93, dtype=tl.uint64)
    times_c = tl.full([BLOCK], 0xCA5A826395121157, dtype=tl.uint64)
    # Ten rounds of Philox4x64; the multipliers and key increments are the paper's constants.
    for _ in tl.static_range(10):
        upper_a, upper_c = tl.umulhi(times_a, a), tl.umulhi(times_c, c)
        lower_a, lower_c = times_a * a, times_c * c
        a, b, c, d = upper_c ^ b ^ low, lower_c, upper_a ^ d ^ high, lower_a
        low += 0x9E3779B97F4A7C15
        high += 0xBB67AE8584CAA73B
    place = index * 8
    _store_pair(out, place, a, count, scale)
    _store_pair(out, place + 2, b, count, scale)
    _store_pair(out, place + 4, c, count, scale)
    _store_pair(out, place + 6, d, count, scale)


@kernel
def _store_pair(out: tl.tensor, place: tl.tensor, draw: tl.tensor, count: tl.tensor,
                scale: tl.tensor) -> None:
    """Store the two numbers of each 64-bit draw, the lower half first."""
    lower = draw.to(tl.int32).to(tl.float32) * scale
    upper = (draw >> 32).to(tl.int32).to(tl.float32) * scale
    tl.store(out + place, lower.to(out.dtype.element_ty), mask=place < count)
    tl.store(out + place + 1, upper.to(out.dtype.element_ty), mask=place + 1 < count)
