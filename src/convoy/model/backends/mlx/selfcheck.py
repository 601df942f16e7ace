"""Check on this machine that MLX's layers keep what a route needs of them: over cuts, chunks and batches.

Small layers in 4 bits run in bfloat16, as a stage's do. A boundary between two of them may change no bit.
Other chunks and other rows beside a row may change it by the bound that the kernel publishes.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

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
    layers = [_layer() for _ in range(_NUM_LAYERS)]
    texts = [mx.random.normal((_TOKENS, _HIDDEN)).astype(mx.bfloat16) for _ in range(_SEQUENCES)]
    whole = [_run(layers, [texts[0]], [(0, _TOKENS)])[0]]
    bound = KERNELS[MLX_BF16].bounds.unsplit * max(1.0, float(mx.abs(whole[0]).max()) / 10)
    found = {
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


def _layer() -> MlxLayer:
    norm = mx.ones((_HIDDEN,), mx.bfloat16)
    attention = HeadAttention(
        q=_linear(_HEADS * _HEAD_DIM, _HIDDEN),
        k=_linear(_KV_HEADS * _HEAD_DIM, _HIDDEN),
        v=_linear(_KV_HEADS * _HEAD_DIM, _HIDDEN),
        q_norm=None,
        k_norm=None,
        v_norm=None,
        sinks=None,
        out=_linear(_HIDDEN, _HEADS * _HEAD_DIM),
        head_dim=_HEAD_DIM,
        scale=_HEAD_DIM**-0.5,
        eps=_EPS,
    )
    gate, up, down = _linear(_BETWEEN, _HIDDEN), _linear(_BETWEEN, _HIDDEN), _linear(_HIDDEN, _BETWEEN)
    mlp = GatedMlp(gate, up, down, ACTIVATIONS["silu"])
    return MlxLayer(MlxLayerWeights(LayerNorms(norm, None, norm, None), attention, mlp, None, _EPS))


def _linear(outputs: int, inputs: int) -> Linear:
    values = mx.random.normal((outputs, inputs), scale=inputs**-0.5).astype(mx.bfloat16)
    codes, scales, biases = mx.quantize(values, group_size=_GROUP, bits=_BITS)
    return Linear(CodedMatrix(codes, scales, biases, _GROUP, _BITS, "affine"), None)


if __name__ == "__main__":
    # Its text goes to the standard error.
    raise SystemExit(why_not_steady() or 0)
