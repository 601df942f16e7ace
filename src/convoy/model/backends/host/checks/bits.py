"""Compute a digest of this machine's arithmetic, for comparison with other machines.

Exact mode proves on each machine that a row's bits do not depend on the rows beside it. Two machines may
still differ: their processors have other vector instructions, and their libraries then add in another
order. This digest covers the parts of an exact stage, on fixed numbers: linears, norms, rotary positions,
and attention with its softmax.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from convoy.model.backends.host.checks.selfcheck import least_tile_rows
from convoy.model.kernels.activation import ACTIVATIONS, activate, exp_, softplus, tanh_
from convoy.model.kernels.linear import pad_rows
from convoy.model.kernels.native.norm import rms_norm
from convoy.model.kernels.stored.linear import float_linear
from convoy.model.kv.packed import HeadShape, describe_group
from convoy.model.kv.pool import KvPool
from convoy.model.kv.pools import BlockTable
from convoy.model.layers.attention import LayerBatch, attend
from convoy.model.layers.rope import RoundedOnce
from convoy.wire.messages.control import Row

# Another computation gets another label.
_LABEL = b"convoy bits v3"
SAMPLED_LINEARS = (
    (256, 704, None),
    (704, 256, None),
    (1024, 96, None),
    (40, 105, "silu"),
    (256, 64, "gelu_new"),
)
_ROW_COUNTS = (1, 7, 64)
_HEADS = ((4, 2, 64), (2, 1, 128))
# A prefill, a decode, and a chunk behind them.
_CHUNKS = (150, 1, 20)
_BLOCK = 16


def bits_digest() -> str:
    """Return a hex SHA-256, equal on two machines with exact kernels that agree on this sample.

    Takes 0.04 s of a 2.5 GHz core. It runs on one thread, since the number of threads changes no bit in
    exact mode.
    """
    digest = hashlib.sha256(_LABEL)
    with torch.inference_mode(), _one_thread():
        for part in (*_linears(), *_elementwise(), *_attention()):
            digest.update(part.to(torch.float32).contiguous().numpy().astype("<f4", copy=False).tobytes())
    return digest.hexdigest()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run the body on one thread, and restore the number of threads afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_numbers(name: str, *shape: int) -> torch.Tensor:
    """Return 24 bits of a hash for each number, in [-1, 1).

    They are the same on every machine, unlike the numbers of a random generator.
    """
    size = int(np.prod(shape))
    drawn = np.frombuffer(hashlib.shake_128(name.encode()).digest(4 * size), dtype="<i4")
    return torch.from_numpy(((drawn >> 8).astype(np.float32) * np.float32(2.0**-23)).reshape(shape))


def _linears() -> list[torch.Tensor]:
    found = []
    for width, rows, activation in SAMPLED_LINEARS:
        linear = float_linear(check_numbers("weight", rows, width), check_numbers("bias", rows), activation)
        x = check_numbers("rows", max(_ROW_COUNTS), width)
        found += [linear(pad_rows(x[:count]))[:count] for count in _ROW_COUNTS]
    return found


def _elementwise() -> list[torch.Tensor]:
    x = check_numbers("rows", 7, 1031)
    with RoundedOnce():
        angles = torch.arange(64).float()[:, None] / torch.pow(10_000.0, torch.arange(0, 64, 2).float() / 64)
        turns = [angles.cos(), angles.sin()]
    return [
        rms_norm(x, check_numbers("norm", 1031), 1e-6),
        exp_(8 * x),
        tanh_(4 * x),
        softplus(8 * x),
        *(activate(4 * x, name) for name in sorted(ACTIVATIONS)),
        torch.rsqrt(x * x + 1e-6),
        x.sum(-1),
        *turns,
    ]


def _attention() -> list[torch.Tensor]:
    found = []
    num_blocks = -(-sum(_CHUNKS) // _BLOCK)
    for num_heads, num_kv_heads, head_dim in _HEADS:
        shape = HeadShape(
            num_heads, num_kv_heads, head_dim, _BLOCK, num_blocks, least_rows=least_tile_rows(head_dim)
        )
        pool = KvPool(num_blocks, num_kv_heads, _BLOCK, head_dim)
        table = BlockTable([list(range(num_blocks))])
        query = check_numbers("query", sum(_CHUNKS), num_heads, head_dim)
        kv = check_numbers("kv", sum(_CHUNKS), 2 * num_kv_heads, head_dim)
        start = 0
        for count in _CHUNKS:
            group = describe_group([(Row(0, start, count, 0), table)], 0, shape)
            part = slice(start, start + count)
            found.append(attend(query[part], kv[part], LayerBatch(group, pool)))
            start += count
    return found
