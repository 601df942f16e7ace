"""Compute a decoder layer: attention or a recurrence, then an MLP or experts, with norms and residual sums.

The layers are ours, over MLX's arrays, and not the classes of `mlx_lm`. Those take sequences of one length
and own their caches. Here all rows of a step share each product, at positions of their own (docs/apple.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import mlx.core as mx
from torch import nn

from convoy.model.backends.mlx.layers.attention import AttentionMemory, attend
from convoy.model.backends.mlx.layers.delta import DeltaMemory, DeltaNet
from convoy.model.backends.mlx.layers.experts import FeedForward, MlpBesideExperts
from convoy.model.backends.mlx.layers.latent import MlxLatentAttention
from convoy.model.backends.mlx.layers.matrices import Linear
from convoy.model.backends.mlx.layers.rotation import Rotation, rotate

LayerMemory = AttentionMemory | DeltaMemory


@dataclass(frozen=True)
class HeadAttention:
    """Compute attention with keys and values for each head."""

    q: Linear
    k: Linear
    # None: the values are the keys, before norm and rotation.
    v: Linear | None
    # Of each head's query, key and value.
    q_norm: mx.array | None
    k_norm: mx.array | None
    v_norm: mx.array | None
    # A logit of each head that takes part in the softmax and has no value.
    sinks: mx.array | None
    out: Linear
    head_dim: int
    scale: float
    eps: float
    # Whether the query's linear makes a gate for the result too.
    gated: bool = False

    def __call__(self, x: mx.array, memory: AttentionMemory, rotation: Rotation) -> mx.array:
        """Return the attention's result for ``x`` [T, hidden_size]."""
        q, gate = self.q(x).reshape(len(x), -1, self.head_dim * (2 if self.gated else 1)), None
        if self.gated:
            q, gate = mx.split(q, 2, axis=-1)
        k = self.k(x).reshape(len(x), -1, self.head_dim)
        v = k if self.v is None else self.v(x).reshape(k.shape)
        q, k, v = (
            one if norm is None else mx.fast.rms_norm(one, norm, self.eps)
            for one, norm in ((q, self.q_norm), (k, self.k_norm), (v, self.v_norm))
        )
        memory.pool.write(memory.batch, rotate(k, rotation), v)
        mixed = attend(rotate(q, rotation), memory.pool, memory.batch, self.scale, self.sinks)
        if gate is not None:
            mixed = mixed * mx.sigmoid(gate.reshape(mixed.shape))
        return self.out(mixed)

    @property
    def arrays(self) -> list[mx.array]:
        linears = [one for one in (self.q, self.k, self.v, self.out) if one is not None]
        held = [array for linear in linears for array in linear.arrays]
        others = (self.q_norm, self.k_norm, self.v_norm, self.sinks)
        return held + [one for one in others if one is not None]


@dataclass(frozen=True)
class LayerNorms:
    """Hold the norms before and behind attention, and before and behind the MLP. None: there is none."""

    before: mx.array
    behind: mx.array | None
    # None: the MLP has norms of its own.
    middle: mx.array | None
    after: mx.array | None


@dataclass(frozen=True)
class MlxLayerWeights:
    """Hold one decoder layer."""

    norms: LayerNorms
    mixer: HeadAttention | MlxLatentAttention | DeltaNet
    feed_forward: FeedForward
    # A factor of the layer's result.
    scalar: mx.array | None
    eps: float

    @property
    def arrays(self) -> list[mx.array]:
        norms = [getattr(self.norms, field.name) for field in fields(self.norms)]
        held = [one for one in (*norms, self.scalar) if one is not None]
        return held + self.mixer.arrays + self.feed_forward.arrays


class MlxLayer(nn.Module):
    """Compute one layer. It is a torch module, as `LoadedStage.layers` says, without parameters of torch."""

    def __init__(self, weights: MlxLayerWeights, add: Callable[[mx.array], mx.array] = lambda x: x) -> None:
        """Prepare the layer. ``add`` makes whole sums of this rank's part of them."""
        super().__init__()
        self._weights = weights
        self._add = add

    def forward(self, x: mx.array, memory: LayerMemory, rotation: Rotation | None) -> mx.array:
        """Return the layer's result for ``x`` [T, hidden_size]. Layers with a state have no rotation."""
        own, norms = self._weights, self._weights.norms
        normed = self._normed(x, norms.before)
        if isinstance(own.mixer, DeltaNet):
            assert isinstance(memory, DeltaMemory), "`MlxKvStore` knows the layers"
            mixed = own.mixer(normed, memory)
        else:
            assert isinstance(memory, AttentionMemory), "`MlxKvStore` knows the layers"
            assert rotation is not None, "attention has one"
            mixed = own.mixer(normed, memory, rotation)
        x = x + self._normed(self._add(mixed), norms.behind)
        found = self._add(own.feed_forward(self._normed(x, norms.middle)))
        if isinstance(own.feed_forward, MlpBesideExperts):
            found = own.feed_forward.joined(found)
        x = x + self._normed(found, norms.after)
        return x if own.scalar is None else x * own.scalar

    def _normed(self, x: mx.array, norm: mx.array | None) -> mx.array:
        return x if norm is None else mx.fast.rms_norm(x, norm, self._weights.eps)
