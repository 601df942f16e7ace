"""Unpack small integers from the words that they are packed in, vectorised, on the device of the words."""

from __future__ import annotations

import torch

# The values of codes of 4 bits: of E2M1 twice, and of IQ4_NL.
_E2M1 = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
TWICE_E2M1 = (*_E2M1, *(-one for one in _E2M1))
IQ4_NL = (
    *(-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0),
    *(1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0),
)


def stream_codes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack numbers of ``bits`` bits that follow each other from the lowest bit on, along the last
    dimension.

    ``words`` [..., n] are little-endian integers of any type; the result is uint8 [..., n * bits of a word /
    bits]. Numbers of 3, 5 and 6 bits cross byte borders; eight of them fill as many bytes as each has bits.
    """
    packed = words.contiguous().view(torch.uint8)
    if bits == 8:
        return packed
    if bits in {1, 2, 4}:
        mask = (1 << bits) - 1
        parts = [(packed >> shift).bitwise_and_(mask) for shift in range(0, 8, bits)]
        return torch.stack(parts, -1).flatten(-2)
    # eight numbers of `bits` bits fill `bits` bytes, which an int64 holds: shift each number out of it
    groups = packed.view(*packed.shape[:-1], -1, bits).to(torch.int64)
    joined = groups[..., 0].clone()
    for byte in range(1, bits):
        joined |= groups[..., byte] << (8 * byte)
    mask = (1 << bits) - 1
    codes = [((joined >> (bits * place)) & mask).to(torch.uint8) for place in range(8)]
    return torch.stack(codes, -1).flatten(-2)
