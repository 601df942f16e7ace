"""Compare whole layers in compiled code with their parts, bit for bit, on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from convoy.model.backends.host.checks.attention_check import attention_holds
from convoy.model.backends.host.native_layers import NativeLayers, native_layers
from convoy.model.kernels.native.attention import native_group
from convoy.model.kv.packed import KEY_BLOCK, HeadShape, describe_group
from convoy.model.kv.pool import KvPool
from convoy.model.kv.pools import BlockTable
from convoy.model.layers.attention import LayerBatch
from convoy.model.layers.rope import RopeUse
from convoy.plan.spec.cache import CacheGroup
from convoy.wire.messages.control import Row

_BLOCK = 16  # tokens
_POSITIONS = (2 * KEY_BLOCK, 5, KEY_BLOCK - 1, KEY_BLOCK + 9, 0)
_ROW_BLOCKS = 2 * KEY_BLOCK // _BLOCK + 1
# Padding rows behind the batch's rows, as a stage may have them.
_PADDING = 1


def checked_layers(
    layers: Mapping[int, nn.Module], ropes: Mapping[int, RopeUse], groups: Iterable[CacheGroup]
) -> NativeLayers | None:
    """Return compiled code for these layers, if the first layer of each cache group has the same bits there.

    Returns None where compiled code cannot run them. Takes some milliseconds, and steps of one layer.
    """
    native = native_layers(layers)
    if native is None:
        return None
    for group in groups:
        number = next((layer for layer in group.layers if layer in layers), None)
        if number is None:
            continue
        if not group.attends or ropes[number].spread is None:
            return None
        heads = (group.num_heads, group.num_kv_heads, group.head_dim)
        num_blocks = _ROW_BLOCKS * len(_POSITIONS)
        shape = HeadShape(
            *(*heads, _BLOCK, num_blocks, group.window),
            value_dim=group.value_dim,
            kv_dtype=group.host_dtype,
        )
        # A lone row and five rows together, since both occur in decodes.
        if not attention_holds(shape) or not all(_agree(number, layers[number], shape, n) for n in (1, 5)):
            return None
    return native


@torch.inference_mode()
def _agree(number: int, layer: Any, shape: HeadShape, num_rows: int) -> bool:
    generator = torch.Generator().manual_seed(20)

    def numbers(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    x = numbers(num_rows + _PADDING, layer.self_attn.qkv.in_features)
    heads = (shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
    rotation = (numbers(len(x), *heads), numbers(len(x), *heads))
    filled = numbers(shape.num_blocks * shape.kv_rows[0] * _BLOCK, shape.head_dim)
    tables = [range(row * _ROW_BLOCKS, (row + 1) * _ROW_BLOCKS) for row in range(num_rows)]
    group = describe_group(
        [(Row(row, _POSITIONS[row], 1, 0), BlockTable([[*table][::-1]])) for row, table in enumerate(tables)],
        *(0, shape),
    )
    size = (shape.num_blocks, shape.num_kv_heads, _BLOCK, shape.head_dim)
    pools = [KvPool(*size, shape.kv_dtype) for _ in range(2)]
    for pool in pools:
        pool.write(torch.arange(len(filled)), filled)
    parts, whole = ({number: LayerBatch(group, pool, native_group(group))} for pool in pools)
    expected = layer(x[None], position_embeddings=rotation, use_cache=False, batch=parts)[0]
    found = NativeLayers({number: layer}).run(x, {number: rotation}, whole)
    return found is not None and torch.equal(expected, found) and torch.equal(*(p.all_rows for p in pools))
