"""Run layers that carry several hidden states a token: DeepSeek V4's manifold-constrained hyper-connections.

A token's streams lie side by side in one row, [streams * hidden_size], so they cross a boundary like any
hidden state. Before attention and before the experts, learned weights combine them into one state. The
block's result is mixed back into all streams (Xie et al., 2026; the library's `modeling_deepseek_v4`).
Sums have a fixed order, as everywhere in exact mode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from convoy.model.kernels.activation import exact_sigmoid, exp_
from convoy.model.layers.compressed.attention import CompressedAttention, linear_of
from convoy.model.layers.exact import ExactNorm, RowNorm
from convoy.model.layers.experts import ExactRouter, add_columns
from convoy.model.layers.rope import Rotation
from convoy.model.layers.routed import RoutedExperts


class StreamLayer(nn.Module):
    """Replace the library's layer, with the same weights."""

    def __init__(self, layer: Any, *, packed: bool) -> None:
        super().__init__()
        self.attn_hc = StreamMixer(layer.attn_hc, packed=packed)
        self.ffn_hc = StreamMixer(layer.ffn_hc, packed=packed)
        self.input_layernorm = ExactNorm(layer.input_layernorm)
        self.post_attention_layernorm = ExactNorm(layer.post_attention_layernorm)
        self.self_attn = CompressedAttention(layer.self_attn, packed=packed)
        self.mlp = RoutedExperts(layer.mlp, packed=packed)

    def forward(
        self,
        x: torch.Tensor,
        position_embeddings: Rotation,
        batch: Any,
        input_ids: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Map [1, T, streams * hidden] to the same shape.

        ``input_ids`` is [T] in layers that choose experts by it.
        """
        streams = x[0].view(x.shape[1], self.attn_hc.num_streams, -1)
        post, mix, one = self.attn_hc(streams)
        out, _none = self.self_attn(self.input_layernorm(one)[None], position_embeddings, batch)
        streams = _mixed(streams, post, mix, out[0])
        post, mix, one = self.ffn_hc(streams)
        out = self.mlp(self.post_attention_layernorm(one), input_ids)
        return _mixed(streams, post, mix, out).flatten(1)[None]


class StreamMixer(nn.Module):
    """Combine a token's streams into one state, and compute the weights that mix a result back into them."""

    def __init__(self, connection: Any, *, packed: bool) -> None:
        super().__init__()
        self.num_streams: int = connection.hc_mult
        self._eps = float(connection.hc_eps)
        self._num_rounds: int = connection.hc_sinkhorn_iters
        self.norm = RowNorm(None, connection.input_norm.eps)
        self.fn = StreamWeights(connection.fn, packed=packed)
        self.base: torch.Tensor = connection.base
        self.scale: torch.Tensor = connection.scale

    def forward(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the weights and the combined state of [T, streams, hidden].

        They are the share of a result for each stream [T, streams], the mix from each stream to each [T,
        streams, streams], and the one state [T, hidden].
        """
        num = self.num_streams
        sizes = [num, num, num * num]
        weights = torch.split(self.fn(self.norm(streams.flatten(1))), sizes, dim=-1)
        pre, post, mix = (
            weight * scale + base
            for weight, scale, base in zip(weights, self.scale, torch.split(self.base, sizes), strict=True)
        )
        pre = exact_sigmoid(pre) + self._eps
        one = add_columns(pre[..., None] * streams)
        return 2 * exact_sigmoid(post), self._balanced(mix.view(-1, num, num)), one

    def _balanced(self, mix: torch.Tensor) -> torch.Tensor:
        """Return a softmax of each row, balanced so that rows and columns sum to 1.

        The method is that of Sinkhorn and Knopp, 1967.
        """
        mix = exp_(mix - mix.amax(-1, keepdim=True))
        mix.div_(_row_sums(mix)).add_(self._eps)
        mix.div_(_column_sums(mix) + self._eps)
        for _ in range(self._num_rounds - 1):
            mix.div_(_row_sums(mix) + self._eps)
            mix.div_(_column_sums(mix) + self._eps)
        return mix


class StreamWeights(ExactRouter):
    """Compute the few weights that mix streams. Rounding leaves this module unchanged, as it does routers."""

    def __init__(self, weight: torch.Tensor, *, packed: bool) -> None:
        nn.Module.__init__(self)
        self.weigh = linear_of(weight, packed=packed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Map [T, streams * hidden] to [T, outputs]."""
        weights: torch.Tensor = self.weigh(x)
        return weights


class StreamJoin(nn.Module):
    """Combine the last layer's streams into one state, and normalise it."""

    def __init__(self, head: Any, norm: Any, *, packed: bool) -> None:
        super().__init__()
        self._num_streams: int = head.hc_mult
        self._eps = float(head.eps)
        self.input_norm = RowNorm(None, head.input_norm.eps)
        self.fn = StreamWeights(head.hc_fn, packed=packed)
        self.base: torch.Tensor = head.hc_base
        self.scale: torch.Tensor = head.hc_scale
        self.norm = ExactNorm(norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [M, streams * hidden] to [M, hidden]."""
        pre = exact_sigmoid(self.fn(self.input_norm(x)) * self.scale + self.base) + self._eps
        streams = x.view(len(x), self._num_streams, -1)
        normed: torch.Tensor = self.norm(add_columns(pre[..., None] * streams))
        return normed


def _mixed(streams: torch.Tensor, post: torch.Tensor, mix: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return the streams behind a block with the result ``out`` [T, hidden]."""
    total = post[..., None] * out[:, None]
    # One stream after the other, so that the order of the sum is fixed.
    for number in range(streams.shape[1]):
        total = total + mix[:, number, :, None] * streams[:, number, None]
    return total


def _column_sums(mix: torch.Tensor) -> torch.Tensor:
    return add_columns(mix)[:, None]


def _row_sums(mix: torch.Tensor) -> torch.Tensor:
    return add_columns(mix.transpose(1, 2))[..., None]
