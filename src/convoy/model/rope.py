"""Rotary positions, computed once per fixed block of positions and looked up after that.

cos and sin of the same position must have the same bits in every batch; vector and scalar code paths may
differ, and so may thread chunks. So the model's own rotary module runs on whole blocks, always the same ones.
"""

from __future__ import annotations

import torch
from torch import nn

# 64 positions of at most 512 rotary dimensions stay below ATen's threading grain of 32,768 elements.
_BLOCK = 64


class RopeTable:
    """cos and sin for positions 0..max_context, filled as they are asked for."""

    def __init__(self, rotary: nn.Module, max_context: int) -> None:
        self._rotary = rotary
        self._max_blocks = -(-max_context // _BLOCK)
        self._cos = torch.empty(0)
        self._sin = torch.empty(0)

    def look_up(self, positions: torch.Tensor, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each [1, T, rotary_dim], of int64 ``positions`` [T], none beyond ``last``."""
        if last >= self._cos.shape[0]:
            self._grow(last // _BLOCK + 1)
        return self._cos.index_select(0, positions)[None], self._sin.index_select(0, positions)[None]

    def _grow(self, num_blocks: int) -> None:
        done = self._cos.shape[0] // _BLOCK
        # doubling: a long decode does not copy the table at every 64th token
        num_blocks = max(num_blocks, min(2 * done, self._max_blocks))
        cos, sin = [self._cos] if done else [], [self._sin] if done else []
        for block in range(done, num_blocks):
            positions = torch.arange(block * _BLOCK, (block + 1) * _BLOCK)[None]
            block_cos, block_sin = self._rotary(torch.empty(0), positions)
            cos.append(block_cos[0])
            sin.append(block_sin[0])
        self._cos, self._sin = torch.cat(cos), torch.cat(sin)


def spread_over_heads(
    cos: torch.Tensor, sin: torch.Tensor, *, num_heads: int, num_kv_heads: int, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors, each [T, num_heads + 2 * num_kv_heads, head_dim], that treat q, k and v in one go.

    With r = x rolled by half a head, x * cos + r * sin rotates q and k, scales q, and leaves v as it is.
    ``cos`` and ``sin`` are [1, T, head_dim].
    """
    half = cos.shape[-1] // 2
    signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
    factors = []
    for values, rest in ((cos[0], torch.ones_like), (signed, torch.zeros_like)):
        key = values[:, None].expand(-1, num_kv_heads, -1)
        query = (values * scaling)[:, None].expand(-1, num_heads, -1)
        factors.append(torch.cat((query, key, rest(key)), dim=1))
    return factors[0], factors[1]
