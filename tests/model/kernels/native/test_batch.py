"""Test compiled descriptions of lone rows: those of NumPy and of torch's operators, number for number."""

from __future__ import annotations

import pytest
import torch

from convoy.model.kernels.native import library
from convoy.model.kernels.native.batch import describe_lone, spread
from convoy.model.kv.packed import GroupBatch, HeadShape, describe_group
from convoy.model.kv.pools import BlockTable
from convoy.model.layers.rope import HeadSpread, spread_over_heads
from convoy.wire.messages.control import Row

pytestmark = pytest.mark.skipif(
    library.native_library() is None, reason=f"nothing is compiled here: {library.why_no_native()}"
)
# Before, at and behind ends of blocks, of key blocks and of windows.
POSITIONS = (0, 15, 16, 63, 64, 69, 70, 127, 128, 129, 133, 200)
SHAPES = {
    "groups": HeadShape(16, 4, 64, 16, 400),
    "a window in a ring": HeadShape(3, 3, 32, 16, 400, 70),
    "a window of one key": HeadShape(3, 3, 32, 16, 400, 1),
    "a latent": HeadShape(16, 1, 576, 16, 400, value_dim=512, latent=True),
    "one block for each key block": HeadShape(4, 2, 48, 64, 400, value_dim=32),
}


def lone(shape: HeadShape, positions: tuple[int, ...]) -> list[tuple[Row, BlockTable]]:
    rows, next_block = [], 7
    for number, position in enumerate(positions):
        count = position // shape.block_size + 1
        if shape.window is not None:
            count = min(count, 6)
        rows.append((Row(number, position, 1, 1), BlockTable([list(range(next_block, next_block + count))])))
        next_block += count
    return rows


def tensors(group: GroupBatch) -> list[torch.Tensor]:
    (chunk,) = group.chunks
    return [
        *(group.write_rows, chunk.query_rows, chunk.kv_runs, chunk.hidden),
        *(chunk.pair_tile, chunk.bag_pairs, chunk.bag_starts),
    ]


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("positions", [*((position,) for position in POSITIONS), POSITIONS])
def test_lone_rows_are_described_as_by_numpy(kind: str, positions: tuple[int, ...]) -> None:
    shape = SHAPES[kind]
    rows = lone(shape, positions)
    found, expected = describe_lone(rows, 0, shape), describe_group(rows, 0, shape, None)
    assert found is not None
    assert all(map(torch.equal, tensors(found), tensors(expected)))
    assert [one.dtype for one in tensors(found)] == [one.dtype for one in tensors(expected)]
    assert found.chunks[0].longest == expected.chunks[0].longest
    assert (found.num_tokens, found.output_rows) == (expected.num_tokens, expected.output_rows)


def test_a_row_of_two_tokens_is_left_to_numpy() -> None:
    shape = SHAPES["groups"]
    (row, table), *others = lone(shape, (3, 20))
    assert describe_lone([(Row(row.sequence, row.start, 2, 1), table), *others], 0, shape) is None


@pytest.mark.parametrize("rotary_dim", [64, 16])
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_factors_are_spread_with_torchs_bits(rotary_dim: int, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(3)
    cos, sin = (torch.randn(1, num_tokens, rotary_dim, generator=generator) for _ in range(2))
    # Zeros keep their signs.
    sin[0, 0, :2] = torch.tensor([0.0, -0.0])
    heads = HeadSpread(6, 2, 64, 64**-0.5)
    found, expected = spread(cos, sin, heads), spread_over_heads(cos, sin, heads)
    assert found is not None
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))
