"""Attend over one latent a token: DeepSeek's MLA with its up-projections moved to the query's side.

A head's keys are K = L Wk, of the latents L of all tokens. It holds that q.(l Wk) = (q Wk^T).l, and that
the sum over tokens of p l Wv is (the sum of p l) Wv. Queries are therefore projected once and results
once, and latents stay as they are ("weight absorption", DeepSeek-V2, 2024, section 2.1). For DeepSeek V3
this takes a 71st of the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from convoy.model.kv.packed import SAFE_ROWS


class LatentBatch(Protocol):
    """Describe the inputs of one layer in a step."""

    def attend_latents(self, query: torch.Tensor, kept: torch.Tensor, scaling: float) -> torch.Tensor:
        """Store ``kept`` [T, 1, width] and return the attention [T, heads, rank] of ``query``."""


class LatentAttention(nn.Module):
    """Replace the library's attention, with the same linears and norms except ``kv_b_proj``."""

    def __init__(self, attention: Any, *, packed: bool) -> None:  # noqa: ARG002 - as every replaced part
        super().__init__()
        self.layer_idx: int = attention.layer_idx
        self._scaling = float(attention.scaling)
        self._num_heads: int = attention.num_heads
        self._sizes = [attention.qk_nope_head_dim, attention.qk_rope_head_dim]
        self._rank: int = attention.kv_lora_rank
        self._interleaved = bool(attention.config.rope_interleave)
        # Queries are made by one linear, or by two with a norm between.
        self.q_proj: Any = attention.q_proj
        self.q_a_proj: Any = attention.q_a_proj
        self.q_a_layernorm: Any = attention.q_a_layernorm
        self.q_b_proj: Any = attention.q_b_proj
        self.kv_a_proj_with_mqa = attention.kv_a_proj_with_mqa
        self.kv_a_layernorm = attention.kv_a_layernorm
        self.o_proj = attention.o_proj
        expand = attention.kv_b_proj.weight.detach().view(self._num_heads, -1, self._rank)
        key, value = torch.split(expand, [self._sizes[0], attention.v_head_dim], dim=1)
        self.key_up = nn.Parameter(key.contiguous(), requires_grad=False)
        self.value_up = nn.Parameter(value.transpose(1, 2).contiguous(), requires_grad=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        batch: Mapping[int, LatentBatch],
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend, for hidden states [1, T, hidden]. Returns the same shape, and None."""
        x, rope = hidden_states[0], position_embeddings
        fixed, turning = torch.split(self._queries(x), self._sizes, dim=-1)
        query = torch.cat((each_head(fixed, self.key_up), self._turn(turning, rope)), dim=-1)
        latent, turning = torch.split(self.kv_a_proj_with_mqa(x), [self._rank, self._sizes[1]], dim=-1)
        kept = torch.cat((self.kv_a_layernorm(latent)[:, None], self._turn(turning[:, None], rope)), dim=-1)
        out = batch[self.layer_idx].attend_latents(query, kept, self._scaling)
        return self.o_proj(each_head(out, self.value_up).reshape(1, len(x), -1)), None

    def _queries(self, x: torch.Tensor) -> torch.Tensor:
        """Return the queries [T, heads, nope + rope]."""
        made = self.q_proj(x) if self.q_proj else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        queries: torch.Tensor = made.view(len(x), self._num_heads, -1)
        return queries

    def _turn(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return [T, heads, rotary_dim] rotated.

        Interleaved pairs come out as halves, for queries and keys alike.
        """
        half = x.shape[-1] // 2
        cos, sin = (values[0, :, None, :half] for values in rope)
        first, second = (x[..., 0::2], x[..., 1::2]) if self._interleaved else torch.split(x, half, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def each_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return [T, heads, in] times [heads, in, out]: [T, heads, out].

    On a host every matmul has the same number of rows, so that a row's bits do not depend on the number of
    rows.
    """
    if x.device.type != "cpu":
        return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)
    num_rows = x.shape[0]
    padded = nn.functional.pad(x, (0, 0, 0, 0, 0, -num_rows % SAFE_ROWS)).transpose(0, 1)
    tiles = [torch.bmm(part.contiguous(), weight) for part in torch.split(padded, SAFE_ROWS, dim=1)]
    return torch.cat(tiles, dim=1)[:, :num_rows].transpose(0, 1)
