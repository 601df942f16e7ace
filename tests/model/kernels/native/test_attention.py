"""Test compiled attention over paged pools: torch's bits for lone rows and chunks, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from convoy.errors import StepError
from convoy.model.backends.host.checks.attention_check import attention_holds
from convoy.model.kernels.native import library
from convoy.model.kernels.native.activation import exp_library
from convoy.model.kernels.native.attention import NativeGroup
from convoy.model.kv.packed import HeadShape, describe_group
from convoy.model.kv.pool import KvPool
from convoy.model.kv.pools import BlockTable
from convoy.model.layers.attention import LayerBatch, attend
from convoy.wire.messages.control import Row
from support.tiny_models import Threads

pytestmark = pytest.mark.skipif(
    library.native_library() is None, reason=f"nothing is compiled here: {library.why_no_native()}"
)

# Heads and key heads: alone and in groups, of all tiles; more than 192 dimensions are added in runs.
SHAPES = {
    "groups": HeadShape(16, 4, 64, 16, 100, least_rows=4),
    "alone, windows": HeadShape(3, 3, 32, 16, 100, 70, least_rows=4, kv_dtype="bf16"),
    "two runs": HeadShape(4, 2, 208, 32, 100, kv_dtype="f16"),
    "one key head": HeadShape(12, 1, 256, 16, 100, 3),
    "a latent": HeadShape(16, 1, 576, 16, 100, value_dim=512, latent=True),
    "other values": HeadShape(4, 4, 48, 16, 100, value_dim=32, kv_dtype="bf16"),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_lone_rows_and_chunks_have_torchs_bits_on_every_instruction_set(kind: str, threads: Threads) -> None:
    for count, compiled in enumerate(library.native_libraries(), start=1):
        threads(count)
        assert exp_library((compiled,)) is compiled
        # A window of its own, so that the answer is not kept from before.
        shape = SHAPES[kind]
        window = None if shape.window is None else shape.window + count
        assert attention_holds(replace(shape, window=window), compiled)


def test_a_long_context_has_the_same_bits_in_smaller_parts() -> None:
    """Parts of a tile have fewer queries beyond 64 key blocks."""
    shape, start, size = HeadShape(4, 1, 16, 16, 300), 4200, 40
    pool = KvPool(300, 1, 16, 16)
    generator = torch.Generator().manual_seed(4)
    pool.write(torch.arange(2 * 300 * 16), torch.randn(2 * 300 * 16, 16, generator=generator))
    group = describe_group([(Row(0, start, size, 0), BlockTable([list(range(300))]))], 0, shape)
    query = torch.randn(size, 4, 16, generator=generator)
    kv = torch.randn(size, 2, 16, generator=generator)
    expected = attend(query, kv, LayerBatch(group, pool))
    assert torch.equal(attend(query, kv, LayerBatch(group, pool, NativeGroup(group))), expected)


def test_one_chunk_of_all_tiles_has_the_bits_of_many() -> None:
    shape, generator = HeadShape(4, 2, 16, 16, 800), torch.Generator().manual_seed(5)
    tables = [BlockTable([list(range(40 * row, 40 * row + 40))]) for row in range(20)]
    rows = [(Row(row, 600 - 9 * row, 1 + row % 2 * 30, 0), tables[row]) for row in range(20)]
    many, one = (describe_group(rows, 0, shape, limit) for limit in (1 << 20, None))
    assert (len(many.chunks) > 2, len(one.chunks)) == (True, 2)
    pool = KvPool(800, 2, 16, 16)
    pool.write(torch.arange(2 * 800 * 32), torch.randn(2 * 800 * 32, 16, generator=generator))
    query = torch.randn(many.num_tokens, 4, 16, generator=generator)
    found = [NativeGroup(group).attend_queries(query, pool) for group in (many, one)]
    assert torch.equal(*found)
    kv = pool.all_rows[many.write_rows].view(many.num_tokens, 4, 16)
    assert torch.equal(attend(query, kv, LayerBatch(many, pool)), found[0])


def test_padding_rows_come_back_as_zeros() -> None:
    shape, pool = HeadShape(4, 2, 16, 16, 2), KvPool(2, 2, 16, 16)
    group = describe_group([(Row(0, 0, 20, 0), BlockTable([[1, 0]]))], 0, shape)
    found = NativeGroup(group).attend_queries(torch.randn(23, 4, 16), pool)
    assert found.shape == (23, 4, 16)
    assert not found[20:].any()


def test_a_cap_is_left_to_torch() -> None:
    shape = HeadShape(4, 2, 16, 16, 2)
    group = describe_group([(Row(0, 0, 20, 0), BlockTable([[1, 0]]))], 0, shape)
    query, kv = torch.randn(20, 4, 16), torch.randn(20, 4, 16)
    plain, native = (LayerBatch(group, KvPool(2, 2, 16, 16), one) for one in (None, NativeGroup(group)))
    assert torch.equal(attend(query, kv, plain, cap=5.0), attend(query, kv, native, cap=5.0))
    assert not torch.equal(attend(query, kv, plain, cap=5.0), attend(query, kv, native))


def test_queries_of_another_shape_are_refused_before_an_address_is_taken() -> None:
    shape, pool = HeadShape(4, 2, 16, 16, 2), KvPool(2, 2, 16, 16)
    native = NativeGroup(describe_group([(Row(0, 0, 20, 0), BlockTable([[1, 0]]))], 0, shape))
    for wrong in ((19, 4, 16), (20, 2, 16), (20, 4, 32)):
        with pytest.raises(StepError, match="queries come as"):
            native.attend_queries(torch.zeros(*wrong), pool)
