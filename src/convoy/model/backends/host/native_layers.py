"""Run whole layers for rows of one token: two compiled calls for each layer, with the bits of its parts.

At one row, the torch operators of a layer and the Python between them take as long as reading a sixth of
the layer's weights. Only `exp` remains of them, because its bits are torch's own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from convoy.model.kernels.int8 import Int8Linear, Int8Mlp
from convoy.model.kernels.linear import PackedLinear
from convoy.model.kernels.native.attention import NativeGroup
from convoy.model.kernels.native.library import (
    ChunkStruct,
    LayerStruct,
    LinearStruct,
    WorkStruct,
    native_library,
)
from convoy.model.kernels.native.linears import MAX_F32_ROWS
from convoy.model.kernels.stored.linear import StoredLinear
from convoy.model.kv.pool import KvPool
from convoy.model.layers.attention import LayerBatch
from convoy.model.layers.exact import ExactAttention, ExactMlp, ExactNorm
from convoy.model.layers.rope import Rotation

GATED_ACTIVATIONS = {"silu", "swish"}

Batch = Mapping[int, LayerBatch | Any]


class NativeLayers:
    """Run some layers of a stage, in order. Not thread-safe, as the stage is not."""

    # Attention scores of a step. Beyond that attention takes the time, and goes through caches in chunks.
    max_scores = 1 << 20

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        """Describe ``layers``, which `native_layers` must have accepted, to compiled code."""
        # Kept alive: compiled code has only the addresses of their weights.
        self._held = dict(layers)
        self._layers = {number: _Described(layer) for number, layer in layers.items()}
        library = native_library()
        assert library is not None, "nothing is compiled here"
        self._library = library

    @property
    def is_even(self) -> bool:
        """Return whether all layers need the same working memory."""
        return len({one.widths for one in self._layers.values()}) == 1

    def run(self, x: torch.Tensor, rotations: Mapping[int, Rotation], batch: Batch) -> torch.Tensor | None:
        """Run the layers on float32 [T, hidden]. Return the same shape, or None for another kind of batch.

        ``rotations`` and ``batch`` map layers to the arguments that layers take. Forward hooks of a layer
        are called without inputs and outputs. With None nothing is changed. Raises StepError as
        `NativeGroup.attend` does, and MemoryError.
        """
        step = self._begin(x, rotations, batch)
        if step is None:
            return None
        scores, mix = self._library.convoy_layer_scores, self._library.convoy_layer_mix
        before, raised, done = None, step.raised, 1
        for number, described in self._layers.items():
            work, shares, pool = step.works[number]
            layer = described.reference
            done &= scores(before, layer, work, pool)
            # Torch's own `exp`: a compiled one would have other bits. Each layer therefore needs two calls.
            shares.exp_()
            done &= mix(layer, work, pool)
            raised.exp_()
            before = layer
            # Forward hooks count a layer's runs, so they are called for compiled layers too.
            for told in self._held[number]._forward_hooks.values():
                told(self._held[number], (), None)
        done &= scores(before, None, work, None)
        if not done:
            raise MemoryError(f"there is no memory for {len(x)} rows of 8 bits")
        return step.x

    def _begin(self, x: torch.Tensor, rotations: Mapping[int, Rotation], batch: Batch) -> _Step | None:
        first = next(iter(self._layers.values()))
        if not 0 < len(x) <= MAX_F32_ROWS:
            return None
        groups: dict[int, tuple[NativeGroup, KvPool]] = {}
        for number in self._layers:
            of = batch[number]
            if not isinstance(of, LayerBatch) or of.native is None or not isinstance(of.pool, KvPool):
                return None
            # Refuse before anything is written: the caller then runs torch's operators on the same state.
            if of.native.num_scores > self.max_scores:
                return None
            groups[number] = of.native, of.pool
        return _Step(x, first, {number: (*of, rotations[number]) for number, of in groups.items()})


class _Step:
    """Hold the memory of a step, and the structs that tell compiled code where it lies."""

    def __init__(
        self, x: torch.Tensor, layer: _Described, of: Mapping[int, tuple[NativeGroup, KvPool, Rotation]]
    ) -> None:
        rows, between = len(x), layer.between
        self.x = x.clone(memory_format=torch.contiguous_format)
        self.raised = torch.empty(rows, between)
        normed, both = torch.empty_like(self.x), torch.empty(rows, 2 * between)
        self._held: list[Any] = [normed, both]
        self._shared = (rows, normed, both)
        # By group and rotation, because layers that share both can share their working memory.
        made: dict[tuple[int, int], tuple[Any, torch.Tensor]] = {}
        self.works = {}
        for number, (group, pool, (cos, sin)) in of.items():
            key = (id(group), id(cos))
            if key not in made:
                made[key] = self._work(group, cos, sin, layer.rotary_dim)
            self.works[number] = (*made[key], pool.address)

    def _work(
        self, group: NativeGroup, cos: torch.Tensor, sin: torch.Tensor, rotary_dim: int
    ) -> tuple[Any, torch.Tensor]:
        rows, normed, both = self._shared
        heads, turned = torch.empty(cos.shape), torch.empty(cos.shape)
        group.check(heads, cos, sin, rotary_dim)
        shape, shares = group.shape, torch.empty(group.num_scores)
        mixed = torch.empty(rows, shape.num_heads * shape.head_dim)
        chunks = (ChunkStruct * len(group.chunks))(*group.chunks)
        tensors = [self.x, normed, heads, turned, mixed, both, self.raised]
        tensors += [shares, cos, sin, group.write_rows]
        work = WorkStruct(
            *(tensor.data_ptr() for tensor in tensors),
            *(ctypes.pointer(group.heads(rotary_dim)), chunks, len(chunks)),
            *(rows, group.num_tokens, torch.get_num_threads()),
        )
        self._held += [group, chunks, *tensors]
        return ctypes.byref(work), shares


class _Described:
    """Describe one layer in the structs that compiled code reads."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        norms = [layer.input_layernorm, layer.post_attention_layernorm, attention.q_norm, attention.k_norm]
        if isinstance(mlp, Int8Mlp):
            gate, up, self.between = _linear(mlp.gate_up), LinearStruct(), mlp.width
        else:
            gate, up, self.between = _linear(mlp.gate), _linear(mlp.up), mlp.gate.out_features
        self.rotary_dim: int = attention.rotary_dim
        self.layer = LayerStruct(
            (ctypes.c_void_p * 4)(*(None if norm is None else norm.weight.data_ptr() for norm in norms)),
            *(_linear(attention.qkv), _linear(attention.out), gate, up, _linear(mlp.down)),
            (ctypes.c_float * 4)(*(0.0 if norm is None else norm.eps for norm in norms)),
            *(attention.qkv.in_features, self.between),
        )
        self.reference = ctypes.byref(self.layer)
        self.widths = (attention.qkv.in_features, self.between, self.rotary_dim)


def native_layers(layers: Mapping[int, nn.Module]) -> NativeLayers | None:
    """Return compiled code for ``layers``, which must be plain ones (`Family.plain_layers`).

    Returns None where nothing is compiled, or where a layer has parts that compiled code does not know.
    """
    if native_library() is None or not layers or not all(map(_is_plain, layers.values())):
        return None
    native = NativeLayers(layers)
    return native if native.is_even else None


def _is_plain(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    if type(attention) is not ExactAttention or attention.gate is not None or attention.sinks is not None:
        return False
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    of_heads = [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None]
    if len(of_heads) == 1 or not all(type(norm) is ExactNorm for norm in norms):
        return False
    if not all(norm.takes_lone_rows for norm in (*norms, *of_heads)):
        return False
    linears = [attention.qkv, attention.out]
    if type(mlp) is Int8Mlp:
        kinds: set[type] = {Int8Linear}
        activation = mlp.activation
        linears += [mlp.gate_up, mlp.down]
    elif type(mlp) is ExactMlp:
        kinds, activation = {PackedLinear, StoredLinear}, mlp.gate.activation
        linears += [mlp.gate, mlp.up, mlp.down]
    else:
        return False
    return activation in GATED_ACTIVATIONS and all(
        type(one) in kinds and _compiled(one) is not None for one in linears
    )


def _compiled(linear: Any) -> Any:
    """Return the compiled form of a linear, or None."""
    return linear.stored if type(linear) is StoredLinear else linear.native


def _linear(linear: Any) -> LinearStruct:
    kind = {Int8Linear: "i8", StoredLinear: "stored"}.get(type(linear), "f32")
    described = {kind: ctypes.pointer(_compiled(linear).described)}
    return LinearStruct(outputs=linear.out_features, **described)
