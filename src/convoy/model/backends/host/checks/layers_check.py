"""Compare whole layers in compiled code with their parts, bit for bit, on this machine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from convoy.errors import SelfCheckError
from convoy.model.backends.host.checks.attention_check import attention_holds
from convoy.model.backends.host.layer_description import LayerDescription
from convoy.model.backends.host.native_layers import NativeLayers
from convoy.model.kernels.linear import LEAST_ROWS
from convoy.model.kernels.native.attention import native_group
from convoy.model.kv.packed import KEY_BLOCK, HeadShape, describe_group
from convoy.model.kv.pool import KvPool
from convoy.model.kv.pools import BlockTable
from convoy.model.layers.attention import LayerBatch
from convoy.model.layers.rope import RopeUse, Rotation, Rotations
from convoy.plan.spec.cache import CacheGroup
from convoy.plan.spec.family import LayerForm
from convoy.wire.messages.control import Row

_log = logging.getLogger(__name__)
_BLOCK = 16  # tokens
_POSITIONS = (2 * KEY_BLOCK, 5, KEY_BLOCK - 1, KEY_BLOCK + 9, 0)
_ROW_BLOCKS = 2 * KEY_BLOCK // _BLOCK + 1
# A lone row, and five rows together with a padding row, as a stage may have them.
_CASES = ((1, 0), (5, 1))


def checked_layers(
    layers: Mapping[int, nn.Module],
    form: LayerForm,
    ropes: Mapping[int, RopeUse],
    rotations: Rotations,
    groups: Iterable[CacheGroup],
) -> NativeLayers | None:
    """Return compiled code for the layers that have the same bits there, or None if there are none.

    Of the layers of a cache group that are alike to compiled code, the first is compared. Takes some
    milliseconds, and steps of one layer.
    """
    described: dict[int, LayerDescription] = {}
    for group in groups:
        shape = _head_shape(group) if group.attends else None
        held: dict[object, bool] = {}
        for number in group.layers:
            if number not in layers:
                continue
            try:
                if shape is None or not attention_holds(shape):
                    raise SelfCheckError("compiled layers have no attention of its kind")
                layer = LayerDescription(layers[number], form, has_window=group.window is not None)
            except SelfCheckError as error:
                _log.debug("layer %d runs part by part: %s", number, error.message)
                continue
            if layer.alike not in held:
                held[layer.alike] = has_equal_bits(layer, shape, ropes[number], rotations)
                if not held[layer.alike]:
                    _log.warning(
                        "layers like layer %d have other bits in compiled code, and run by parts", number
                    )
            if held[layer.alike]:
                described[number] = layer
    return NativeLayers(described) if described else None


def _head_shape(group: CacheGroup) -> HeadShape:
    return HeadShape(
        *(group.num_heads, group.num_kv_heads, group.head_dim, _BLOCK, _ROW_BLOCKS * len(_POSITIONS)),
        group.window,
        value_dim=group.value_dim,
        kv_dtype=group.host_dtype,
    )


@torch.inference_mode()
def has_equal_bits(layer: LayerDescription, shape: HeadShape, rope: RopeUse, rotations: Rotations) -> bool:
    """Return whether a layer has the bits of its parts in compiled code, K and V included."""

    def rotated(positions: list[int]) -> Rotation:
        return rotations.look_up([rope], torch.tensor(positions), max(_POSITIONS))[rope]

    return all(_agree(layer, shape, rotated, *case) for case in _CASES)


def _agree(
    layer: LayerDescription,
    shape: HeadShape,
    rotated: Callable[[list[int]], Rotation],
    num_rows: int,
    padding: int,
) -> bool:
    generator = torch.Generator().manual_seed(20)
    x = torch.randn(LEAST_ROWS + padding, layer.hidden, generator=generator)
    filled = torch.randn(shape.num_blocks * shape.kv_rows[0] * _BLOCK, shape.head_dim, generator=generator)
    group = describe_group(
        [(Row(row, _POSITIONS[row], 1, 0), BlockTable([_reversed_blocks(row)])) for row in range(num_rows)],
        *(0, shape),
    )
    size = (shape.num_blocks, shape.num_kv_heads, _BLOCK, shape.head_dim)
    pools = [KvPool(*size, shape.kv_dtype) for _ in range(2)]
    for pool in pools:
        pool.write(torch.arange(len(filled)), filled)
    positions = [*_POSITIONS[:num_rows], *[0] * (len(x) - num_rows)]
    number = layer.layer.self_attn.layer_idx
    parts, whole = ({number: LayerBatch(group, pool, native_group(group))} for pool in pools)
    expected = layer.layer(x[None], position_embeddings=rotated(positions), use_cache=False, batch=parts)[0]
    native, count = NativeLayers({number: layer}), num_rows + padding
    if not native.can_run(count, whole):
        return False
    found = native.run([number], x[:count], {number: rotated(positions[:count])}, whole)
    return torch.equal(expected[:count], found) and torch.equal(*(pool.all_rows for pool in pools))


def _reversed_blocks(row: int) -> list[int]:
    """Return a table in reverse, so that code which ignored it would be found out."""
    return list(range(row * _ROW_BLOCKS, (row + 1) * _ROW_BLOCKS))[::-1]
