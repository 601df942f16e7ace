"""Put a decoder layer's linears, norms, attention and MLP into exact form, inside the library's layer.

Besides fixing the order of sums, this saves calls: at one token a step, a small layer is mostly overhead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from convoy.errors import ModelError
from convoy.model.kernels.activation import ExactXielu, exact_sigmoid
from convoy.model.kernels.linear import PackedLinear
from convoy.model.kernels.native.norm import norm_library, rms_norm
from convoy.model.kernels.stored.linear import stored_linear
from convoy.model.kernels.stored.weights import Weight, join_rows, take_rows
from convoy.model.kv.pool import KvPool
from convoy.model.layers.attention import LayerBatch, attend
from convoy.model.layers.experts import (
    ExactExperts,
    ExactRouter,
    GatedShare,
    RouterScores,
    activation_name,
    has_gated_share,
    is_experts,
    is_router,
)
from convoy.model.layers.rope import HeadSpread
from convoy.plan.spec.family import Family, NormKind
from convoy.plan.spec.weights import is_router as is_router_name

# The library's name of a layer's attention.
_ATTENTION = "self_attn"


class RowNorm(nn.Module):
    """Compute x / sqrt(mean(x^2) + eps) * weight.

    For two or more rows, no row's mean is split between threads.
    """

    def __init__(self, weight: torch.Tensor | None, eps: float) -> None:
        super().__init__()
        self.weight = None if weight is None else nn.Parameter(weight.detach(), requires_grad=False)
        self.eps = float(eps)

    @property
    def takes_lone_rows(self) -> bool:
        """Return whether a lone row has the same bits as beside other rows."""
        return self.weight is not None and norm_library(len(self.weight)) is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [..., size] to the same shape."""
        # A stage on a device may use this module too, so the compiled norm is not always possible.
        if x.dtype == torch.float32 and x.device.type == "cpu":
            return rms_norm(x, self.weight, self.eps)
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class ExactNorm(RowNorm):
    """Replace a norm of the library with a `RowNorm`."""

    def __init__(self, norm: Any, kind: NormKind = "weight") -> None:
        # Some norms have no weight and only normalise.
        weight: torch.Tensor | None = getattr(norm, "weight", None)
        if weight is not None and kind == "one plus weight":
            weight = 1.0 + weight.detach().to(torch.float32)
        super().__init__(weight, getattr(norm, "variance_epsilon", None) or norm.eps)


class ExactMlp(nn.Module):
    """Compute down(activation(gate(x)) * up(x)), with the activation and the product inside the linears."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        activation = activation_name(mlp.config)
        if hasattr(mlp, "gate_up_proj"):
            joined = mlp.gate_up_proj
            half = joined.weight.shape[0] // 2
            gate, up = (take_rows(joined.weight, rows) for rows in (slice(half), slice(half, None)))
            gate_bias, up_bias = (None, None) if joined.bias is None else joined.bias.chunk(2)
            self.gate, self.up = stored_linear(gate, gate_bias, activation), stored_linear(up, up_bias)
        else:
            self.gate, self.up = _pack(mlp.gate_proj, activation), _pack(mlp.up_proj)
        self.down = _pack(mlp.down_proj)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., rows, hidden] to the same shape."""
        down: torch.Tensor = self.down(self.up.times(x, self.gate(x)))
        return down


class ExactAttention(nn.Module):
    """Attend with one linear for q, k and v, and one rotation over all heads."""

    def __init__(self, attention: Any, rotary_dim: int, family: Family) -> None:
        super().__init__()
        self.layer_idx: int = attention.layer_idx
        self.rotary_dim = rotary_dim
        self._head_dim: int = attention.head_dim
        if rotary_dim > self._head_dim:
            raise ModelError(
                f"layer {self.layer_idx} turns {rotary_dim} dimensions of heads of {self._head_dim}",
                hint="partial_rotary_factor in config.json is at most 1",
            )
        self.qkv, self._num_heads = _joined_qkv(attention, gated=family.gated)
        self.gate = _pack(_query_part(attention, 1)) if family.gated else None
        self._num_kv_heads = (self.qkv.out_features // self._head_dim - self._num_heads) // 2
        self._scaling = float(attention.scaling)
        self.out = _pack(attention.o_proj)
        self.q_norm = _norm_of_heads(attention, "q_norm", family)
        self.k_norm = _norm_of_heads(attention, "k_norm", family)
        self.sinks: torch.Tensor | None = getattr(attention, "sinks", None)

    @property
    def spread(self) -> HeadSpread:
        """Return how the layer's rotations must be laid out."""
        return HeadSpread(self._num_heads, self._num_kv_heads, self._head_dim, self._scaling)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        batch: Mapping[int, LayerBatch],
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend, for hidden states [1, T, hidden]. Returns the same shape, and None.

        ``position_embeddings`` is as `rope.spread_over_heads` returns it.
        """
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
        layer = batch[self.layer_idx]
        if layer.native is not None and isinstance(layer.pool, KvPool):
            out = layer.native.attend(heads, cos, sin, self.rotary_dim, layer.pool, sinks=self.sinks)
        else:
            out = self._attend(heads, cos, sin, layer)
        out = out.view(1, len(heads), -1)
        if self.gate is not None:
            out = exact_sigmoid(self.gate(hidden_states)).mul_(out)
        return self.out(out), None

    def _attend(
        self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layer: LayerBatch
    ) -> torch.Tensor:
        turned = heads * cos
        turned.add_(self._rolled(heads).mul_(sin))
        query, kv = turned[:, : self._num_heads], turned[:, self._num_heads :]
        return attend(query, kv, layer, sinks=self.sinks)

    def _rolled(self, heads: torch.Tensor) -> torch.Tensor:
        """Return ``heads`` with the halves of the rotary part exchanged."""
        half, end = self.rotary_dim // 2, self.rotary_dim
        if end == self._head_dim:
            return torch.roll(heads, half, -1)
        return torch.cat((heads[..., half:end], heads[..., :half], heads[..., end:]), dim=-1)


def make_layer_exact(layer: nn.Module, rotary_dim: int, family: Family) -> ExactAttention | None:
    """Replace a layer's parts in place, which frees the originals. Return its attention if that is ours now.

    The parts' forms are those of ``family``'s row. ``rotary_dim`` is the number of rotated dimensions of a
    head. Raises ModelError for parts without an exact form.
    """
    attention: ExactAttention | None = None
    # Whole blocks first: they contain linears and norms, which the loop below would otherwise replace one by
    # one.
    for name, part in list(layer.named_modules()):
        if family.plain_attention and name == _ATTENTION:
            attention = ExactAttention(part, rotary_dim, family)
            layer.set_submodule(name, attention)
        elif _is_mlp(part):
            layer.set_submodule(name, ExactMlp(part))
        elif hasattr(part, "alpha_p"):
            # Apertus's activation, with numbers that it learned.
            layer.set_submodule(name, ExactXielu(part))
        elif has_gated_share(part):
            layer.set_submodule(name, GatedShare(part))
        elif is_experts(part):
            layer.set_submodule(name, ExactExperts(part, family.expert_gate))
        elif family.router is not None and is_router(part):
            layer.set_submodule(name, ExactRouter(part, family.router))
    # Gemma 4's gate of the per-layer input, with the layer's own activation.
    gate = getattr(layer, "per_layer_input_gate", None)
    if isinstance(gate, nn.Linear):
        layer.per_layer_input_gate = _pack(gate, activation_name(layer.config))
        layer.act_fn = nn.Identity()
    for name, part in list(layer.named_modules()):
        if isinstance(part, nn.Linear):
            packed = _pack(part)
            layer.set_submodule(name, RouterScores(packed) if is_router_name(f"{name}.weight") else packed)
        elif family.norm is not None and _is_norm(part):
            layer.set_submodule(name, ExactNorm(part, family.norm))
    return attention


def make_norm_exact(norm: nn.Module, family: Family) -> nn.Module:
    """Return the final norm in exact form, or unchanged where it has none."""
    return norm if family.norm is None or not _is_norm(norm) else ExactNorm(norm, family.norm)


def _is_mlp(part: Any) -> bool:
    names = ("gate_up_proj",) if hasattr(part, "gate_up_proj") else ("gate_proj", "up_proj")
    return all(isinstance(getattr(part, name, None), nn.Linear) for name in (*names, "down_proj"))


def _is_norm(part: nn.Module) -> bool:
    """Return whether ``part`` is a norm of the library: it has an epsilon, a weight at most, and no parts."""
    if isinstance(part, RowNorm) or any(True for _ in part.children()):
        return False
    # An activation may have an epsilon too, beside numbers of its own (Apertus).
    own = {name for name, _ in (*part.named_parameters(), *part.named_buffers())}
    return own <= {"weight"} and (hasattr(part, "variance_epsilon") or hasattr(part, "eps"))


def _norm_of_heads(attention: Any, name: str, family: Family) -> ExactNorm | None:
    norm = getattr(attention, name, None)
    return None if norm is None or family.norm is None else ExactNorm(norm, family.norm)


def _joined_qkv(attention: Any, *, gated: bool) -> tuple[PackedLinear, int]:
    """Return one linear for q, k and v, and the number of query heads."""
    if hasattr(attention, "qkv_proj"):
        joined = attention.qkv_proj
        return _pack(joined), attention.o_proj.in_features // attention.head_dim
    query = _query_part(attention, 0) if gated else attention.q_proj
    parts = [query, attention.k_proj, attention.v_proj]
    bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
    num_heads = parts[0].out_features // attention.head_dim
    return stored_linear(join_rows([part.weight for part in parts]), bias), num_heads


@dataclass(frozen=True)
class _Rows:
    """Hold some outputs of a linear, as its weight and bias."""

    weight: Weight
    bias: torch.Tensor | None

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]


def _query_part(attention: Any, part: int) -> _Rows:
    """Return the outputs of each head's query (0) or gate (1), from the linear that makes both."""
    both = attention.q_proj
    rows = torch.arange(both.out_features).view(-1, 2, attention.head_dim)[:, part].flatten()
    return _Rows(take_rows(both.weight, rows), None if both.bias is None else both.bias[rows])


def _pack(linear: nn.Linear | _Rows, activation: str | None = None) -> PackedLinear:
    return stored_linear(linear.weight, linear.bias, activation)
