"""Attend over one latent a token: DeepSeek's MLA with its up-projections moved to the query's side.

`model.layers.latent` explains the method. The up-projections are held unpacked, one matrix for each head.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from convoy.model.backends.mlx.layers.attention import AttentionMemory, attend
from convoy.model.backends.mlx.layers.matrices import Linear
from convoy.model.backends.mlx.layers.rotation import Rotation, rotate

# The library's norms of latents do not take the model's own.
_EPS = 1e-6


@dataclass(frozen=True)
class MlxLatentAttention:
    """Compute attention over latents."""

    # One linear makes queries, or two with a norm between.
    q: Linear
    q_norm: mx.array | None
    q_up: Linear | None
    latent: Linear
    latent_norm: mx.array
    # [heads, fixed width of a query, latent], and [heads, latent, width of a value].
    key_up: mx.array
    value_up: mx.array
    out: Linear
    scale: float
    # Whether neighbouring dimensions turn together. They are put apart, for queries and keys alike.
    interleaved: bool

    def __call__(self, x: mx.array, memory: AttentionMemory, rotation: Rotation) -> mx.array:
        """Return the attention's result for ``x`` [T, hidden_size]."""
        heads, fixed, rank = self.key_up.shape
        q = self.q(x)
        if self.q_up is not None:
            assert self.q_norm is not None, "two linears have a norm between"
            q = self.q_up(mx.fast.rms_norm(q, self.q_norm, _EPS))
        q = q.reshape(len(x), heads, -1)
        q = mx.concatenate(
            [_each_head(q[..., :fixed], self.key_up), self._turn(q[..., fixed:], rotation)], -1
        )
        kept = self.latent(x)[:, None]
        normed = mx.fast.rms_norm(kept[..., :rank], self.latent_norm, _EPS)
        keys = mx.concatenate([normed, self._turn(kept[..., rank:], rotation)], -1)
        memory.pool.write(memory.batch, keys, None)
        mixed = attend(q, memory.pool, memory.batch, self.scale).reshape(len(x), heads, rank)
        return self.out(_each_head(mixed, self.value_up).reshape(len(x), -1))

    def _turn(self, x: mx.array, rotation: Rotation) -> mx.array:
        if self.interleaved:
            x = mx.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
        return rotate(x, rotation)

    @property
    def arrays(self) -> list[mx.array]:
        linears = [one for one in (self.q, self.q_up, self.latent, self.out) if one is not None]
        held = [array for linear in linears for array in linear.arrays]
        norms = [self.latent_norm] if self.q_norm is None else [self.q_norm, self.latent_norm]
        return held + norms + [self.key_up, self.value_up]


def _each_head(x: mx.array, weight: mx.array) -> mx.array:
    """Return [T, heads, in] times [heads, in, out]: [T, heads, out]."""
    return (x.swapaxes(0, 1) @ weight).swapaxes(0, 1)
