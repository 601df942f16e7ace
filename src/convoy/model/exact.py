"""A decoder layer's parts in exact form: the library's layer stays, its linears, norms and MLP are replaced.

Besides fixing the order of sums, this saves calls: at one token a step, a small layer is mostly overhead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from convoy.errors import ModelError
from convoy.model.attention import LayerBatch, attend
from convoy.model.linear import FUSED_ACTIVATIONS, PackedLinear

# One linear each for q, k and v, norms of q and k or none, halves of a head rotated, and no more than that.
_PLAIN_ATTENTION = {"LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention"}
# x / rms(x) * weight, with no offset
_PLAIN_NORM = {"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"}


class ExactNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight; for two or more rows, no row's mean is split between threads."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight = norm.weight
        self._eps = float(norm.variance_epsilon)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] to the same shape."""
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self._eps)  # type: ignore[arg-type]


class ExactMlp(nn.Module):
    """down(activation(gate(x)) * up(x)) with the activation and the product inside the linears."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate = _pack(mlp.gate_proj, str(mlp.config.hidden_act))
        self.up = _pack(mlp.up_proj)
        self.down = _pack(mlp.down_proj)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., rows, hidden] to the same shape."""
        down: torch.Tensor = self.down(self.up.times(x, self.gate(x)))
        return down


class ExactAttention(nn.Module):
    """Attention with one linear for q, k and v and one rotation over all heads."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.layer_idx: int = attention.layer_idx
        self._head_dim: int = attention.head_dim
        self._num_heads = attention.q_proj.out_features // attention.head_dim
        self._num_kv_heads = attention.k_proj.out_features // attention.head_dim
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
        self.qkv = PackedLinear(torch.cat([part.weight for part in parts]), bias)
        self.out = _pack(attention.o_proj)
        self.q_norm = ExactNorm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.k_norm = ExactNorm(attention.k_norm) if hasattr(attention, "k_norm") else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        batch: Mapping[int, LayerBatch],
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """[1, T, hidden]; ``position_embeddings`` as `rope.spread_over_heads` makes them."""
        cos, sin = position_embeddings
        heads = self.qkv(hidden_states[0]).view(hidden_states.shape[1], -1, self._head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            ends = self._num_heads, self._num_heads + self._num_kv_heads
            parts = (
                self.q_norm(heads[:, : ends[0]]),
                self.k_norm(heads[:, ends[0] : ends[1]]),
                heads[:, ends[1] :],
            )
            heads = torch.cat(parts, dim=1)
        turned = heads * cos
        turned.add_(torch.roll(heads, self._head_dim // 2, -1).mul_(sin))
        out = attend(turned[:, : self._num_heads], turned[:, self._num_heads :], batch[self.layer_idx])
        return self.out(out.view(1, out.shape[0], -1)), None


def make_layer_exact(layer: nn.Module) -> bool:
    """Replace a layer's parts in place, freeing the originals; whether its attention is now `ExactAttention`.

    Raises ModelError for an activation that has no fused form.
    """
    fused = False
    for name, part in list(layer.named_modules()):
        kind = type(part).__name__
        if kind in _PLAIN_ATTENTION:
            layer.set_submodule(name, ExactAttention(part))
            fused = True
        elif all(
            isinstance(getattr(part, key, None), nn.Linear) for key in ("gate_proj", "up_proj", "down_proj")
        ):
            _check_activation(str(part.config.hidden_act))
            layer.set_submodule(name, ExactMlp(part))
    for name, part in list(layer.named_modules()):
        if isinstance(part, nn.Linear):
            layer.set_submodule(name, _pack(part))
        elif type(part).__name__ in _PLAIN_NORM:
            layer.set_submodule(name, ExactNorm(part))
    return fused


def make_output_exact(norm: nn.Module, output: nn.Linear) -> tuple[nn.Module, PackedLinear]:
    """The final norm and `lm_head` in exact form."""
    return ExactNorm(norm) if type(norm).__name__ in _PLAIN_NORM else norm, _pack(output)


def _pack(linear: nn.Linear, activation: str | None = None) -> PackedLinear:
    return PackedLinear(linear.weight, linear.bias, activation)


def _check_activation(activation: str) -> None:
    if activation not in FUSED_ACTIVATIONS:
        raise ModelError(
            f"the activation {activation!r} has no exact form here", hint='set kernel = "plain-f32"'
        )
