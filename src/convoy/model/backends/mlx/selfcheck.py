"""Check on this machine that MLX's layers keep what a route needs of them: over cuts, chunks and batches.

Small layers in 4 bits run in bfloat16, as a stage's do. A boundary between two of them may change no bit.
Other chunks and other rows beside a row may change it by the bound that the kernel publishes. The same
layers in torch's float32 on the processor bound an error that all runs on MLX share.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import torch
from torch.nn import functional

from convoy.config.kernels import KERNELS, MLX_BF16
from convoy.model.backends.mlx.arrays import OwnerThread, to_mlx, to_torch
from convoy.model.backends.mlx.layers.attention import AttentionMemory, MlxPool, describe_group
from convoy.model.backends.mlx.layers.layer import HeadAttention, LayerNorms, MlxLayer, MlxLayerWeights
from convoy.model.backends.mlx.layers.matrices import ACTIVATIONS, CodedMatrix, GatedMlp, Linear
from convoy.model.kv.pools import BlockTable
from convoy.wire.messages.control import Row

_HIDDEN, _BETWEEN, _HEAD_DIM, _HEADS, _KV_HEADS = 256, 512, 64, 4, 2
_GROUP, _BITS, _EPS = 64, 4, 1e-6
_NUM_LAYERS, _BLOCK, _TOKENS, _SEQUENCES = 2, 16, 40, 3


def why_not_steady() -> str:
    """Return what differs on this machine and by how much, with the bound, or ""."""
    owner = OwnerThread()
    try:
        return owner.run(_find_difference)
    finally:
        owner.end()


def _find_difference() -> str:
    mx.random.seed(0)
    drawn = [_layer() for _ in range(_NUM_LAYERS)]
    layers = [layer for layer, _ in drawn]
    texts = [mx.random.normal((_TOKENS, _HIDDEN)).astype(mx.bfloat16) for _ in range(_SEQUENCES)]
    whole = [_run(layers, [texts[0]], [(0, _TOKENS)])[0]]
    bounds, greatest = KERNELS[MLX_BF16].bounds, float(mx.abs(whole[0]).max())
    bound = bounds.grown(bounds.unsplit, greatest)
    found = {
        "from the processor's float32": (
            _on_host([linears for _, linears in drawn], texts[0]),
            bounds.grown(bounds.library, greatest),
        ),
        "over a cut": (_run(layers, [texts[0]], [(0, _TOKENS)], cut=True)[0], 0.0),
        "over chunks": (
            _run(layers, [texts[0]], [(0, 24), (24, _TOKENS - 1), (_TOKENS - 1, _TOKENS)])[0],
            bound,
        ),
        "beside other rows": (
            _run(layers, texts, [(0, 24), (24, _TOKENS - 1), (_TOKENS - 1, _TOKENS)])[0],
            bound,
        ),
    }
    for name, (other, most) in found.items():
        apart = float(mx.abs(other - whole[0]).max())
        # A number that is none is above no bound.
        if not apart <= most:
            return f"its start-up check found {apart:.2g} {name}, expected at most {most:.2g}"
    return ""


def _run(
    layers: Sequence[MlxLayer],
    texts: Sequence[mx.array],
    spans: Sequence[tuple[int, int]],
    *,
    cut: bool = False,
) -> list[mx.array]:
    """Return the results of sequences that run together, in float32, a step for each span of positions."""
    blocks = -(-_TOKENS // _BLOCK)
    places = len(texts) * blocks * _BLOCK
    shape = (_KV_HEADS, places, _HEAD_DIM)
    pools = [MlxPool(mx.zeros(shape, mx.bfloat16), mx.zeros(shape, mx.bfloat16), _HEAD_DIM) for _ in layers]
    tables = [BlockTable([list(range(n * blocks, (n + 1) * blocks))]) for n in range(len(texts))]
    steps = []
    for start, end in spans:
        rows = [(Row(number, start, end - start, 0), table) for number, table in enumerate(tables)]
        batch = describe_group(rows, 0, _BLOCK, None)
        angles = np.outer(np.tile(np.arange(start, end), len(texts)), 0.5 ** np.arange(_HEAD_DIM // 2))
        rotation = (mx.array(np.cos(angles)[:, None]), mx.array(np.sin(angles)[:, None]))
        x = mx.concatenate([text[start:end] for text in texts])
        for layer, pool in zip(layers, pools, strict=True):
            x = layer(x, AttentionMemory(pool, batch), tuple(one.astype(mx.float32) for one in rotation))
            x = to_mlx(to_torch(x)) if cut else x
        steps.append(x.astype(mx.float32).reshape(len(texts), end - start, _HIDDEN))
    return list(mx.concatenate(steps, axis=1))


def _on_host(layers: Sequence[Sequence[Linear]], text: mx.array) -> mx.array:
    """Return the result of one sequence, computed by torch from the values of the codes.

    Each layer has the linears of queries, keys, values, the attention's result, gate, up and down.
    """
    x = to_torch(text).float()
    angles = torch.outer(torch.arange(_TOKENS), 0.5 ** torch.arange(_HEAD_DIM // 2)).double()
    cos, sin = (turn(angles).float()[:, None] for turn in (torch.cos, torch.sin))

    def heads(values: torch.Tensor, *, turned: bool) -> torch.Tensor:
        values = values.view(_TOKENS, -1, _HEAD_DIM)
        if turned:
            low, high = values.chunk(2, -1)
            values = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
        return values.transpose(0, 1)

    for linears in layers:
        q, k, v, out, gate, up, down = map(_values, linears)
        normed = functional.rms_norm(x, (_HIDDEN,), eps=_EPS)
        mixed = functional.scaled_dot_product_attention(
            heads(normed @ q.T, turned=True),
            heads(normed @ k.T, turned=True),
            heads(normed @ v.T, turned=False),
            is_causal=True,
            enable_gqa=True,
        )
        x = x + mixed.transpose(0, 1).flatten(1) @ out.T
        normed = functional.rms_norm(x, (_HIDDEN,), eps=_EPS)
        x = x + (functional.silu(normed @ gate.T) * (normed @ up.T)) @ down.T
    return to_mlx(x)


def _values(linear: Linear) -> torch.Tensor:
    """Return the values of a matrix of codes, float32 [outputs, inputs], without MLX's arithmetic."""
    codes, scales, biases = (to_torch(array) for array in linear.arrays)
    apart = (codes.view(torch.int32)[..., None] >> torch.arange(0, 32, _BITS)) & ((1 << _BITS) - 1)
    grouped = apart.view(len(codes), -1, _GROUP).float()
    return (grouped * scales.float()[..., None] + biases.float()[..., None]).flatten(1)


def _layer() -> tuple[MlxLayer, Sequence[Linear]]:
    """Return a layer with random codes, and its linears in the order of `_on_host`."""
    norm = mx.ones((_HIDDEN,), mx.bfloat16)
    shapes = (
        *((heads * _HEAD_DIM, _HIDDEN) for heads in (_HEADS, _KV_HEADS, _KV_HEADS)),
        *((_HIDDEN, _HEADS * _HEAD_DIM), (_BETWEEN, _HIDDEN), (_BETWEEN, _HIDDEN), (_HIDDEN, _BETWEEN)),
    )
    q, k, v, out, gate, up, down = linears = [_linear(*shape) for shape in shapes]
    attention = HeadAttention(
        q=q,
        k=k,
        v=v,
        q_norm=None,
        k_norm=None,
        v_norm=None,
        sinks=None,
        out=out,
        head_dim=_HEAD_DIM,
        scale=_HEAD_DIM**-0.5,
        eps=_EPS,
    )
    mlp = GatedMlp(gate, up, down, ACTIVATIONS["silu"])
    norms = LayerNorms(norm, None, norm, None)
    return MlxLayer(MlxLayerWeights(norms, attention, mlp, None, _EPS)), linears


def _linear(outputs: int, inputs: int) -> Linear:
    values = mx.random.normal((outputs, inputs), scale=inputs**-0.5).astype(mx.bfloat16)
    codes, scales, biases = mx.quantize(values, group_size=_GROUP, bits=_BITS)
    return Linear(CodedMatrix(codes, scales, biases, _GROUP, _BITS, "affine"), None)


if __name__ == "__main__":
    # Its text goes to the standard error.
    raise SystemExit(why_not_steady() or 0)
