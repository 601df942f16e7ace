"""Compute a decoder layer: attention and then a gated MLP or experts, each with a norm and a residual sum.

The layers are ours, over MLX's arrays, and not the classes of `mlx_lm`. Those take sequences of one length
and own their caches. Here all rows of a step share each product, at positions of their own (docs/apple.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
from torch import nn

from convoy.model.backends.mlx.attention import AttentionBatch, attend
from convoy.model.backends.mlx.rotation import Rotation, rotate
from convoy.model.backends.mlx.weights import MlxLayerWeights


@dataclass
class MlxPool:
    """Hold one layer's keys and values, [kv_heads, places, head_dim].

    No other reference to either array is kept: MLX writes in place only then, and copies the pool otherwise.
    """

    keys: mx.array
    values: mx.array

    def write(self, batch: AttentionBatch, keys: mx.array, values: mx.array) -> None:
        """Write the step's keys and values, [T, kv_heads, head_dim]."""
        self.keys[:, batch.written] = keys.transpose(1, 0, 2)
        self.values[:, batch.written] = values.transpose(1, 0, 2)


class MlxLayer(nn.Module):
    """Compute one layer. It is a torch module, as `LoadedStage.layers` says, without parameters of torch."""

    def __init__(self, weights: MlxLayerWeights, head_dim: int, eps: float) -> None:
        super().__init__()
        self._weights = weights
        self._head_dim = head_dim
        self._eps = eps

    def forward(self, x: mx.array, pool: MlxPool, batch: AttentionBatch, rotation: Rotation) -> mx.array:
        """Return the layer's result for ``x`` [T, hidden_size]."""
        own = self._weights
        normed = mx.fast.rms_norm(x, own.input_norm, self._eps)
        q, k, v = (linear(normed).reshape(len(x), -1, self._head_dim) for linear in (own.q, own.k, own.v))
        if own.q_norm is not None:
            q = mx.fast.rms_norm(q, own.q_norm, self._eps)
        if own.k_norm is not None:
            k = mx.fast.rms_norm(k, own.k_norm, self._eps)
        pool.write(batch, rotate(k, rotation), v)
        mixed = attend(rotate(q, rotation), pool.keys, pool.values, batch, self._head_dim**-0.5)
        x = x + own.out(mixed)
        normed = mx.fast.rms_norm(x, own.middle_norm, self._eps)
        return x + own.feed_forward(normed)
