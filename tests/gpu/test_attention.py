"""The paged-attention kernels against slow attention in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from convoy.model.kv.pools import BlockTable
from convoy.wire.messages.control import Row
from support.kernels import INTERPRETED, draw_rows, error_of, why_not

if why_not() is not None:
    pytest.skip(str(why_not()), allow_module_level=True)

from convoy.model.backends.cuda.batch import describe_rows, on_device
from convoy.model.backends.cuda.kernels.attention import LOG2_E, DeviceHeadShape, attend
from support.slow_kernels import attend_slowly

pytestmark = pytest.mark.gpu
# For bfloat16: its numbers lie at most 2^-9 apart.
TOLERANCE = 1e-2
LLAMA = DeviceHeadShape(
    num_heads=32, num_kv_heads=8, head_dim=128, value_dim=128, block_size=16, scale=128**-0.5
)
SHAPES: Mapping[str, DeviceHeadShape] = {
    "llama": LLAMA,
    "odd": DeviceHeadShape(6, 2, 24, 24, 16, 24**-0.5),
    "many to one": DeviceHeadShape(14, 2, 64, 64, 16, 64**-0.5),
    "one to one": DeviceHeadShape(4, 4, 64, 64, 32, 64**-0.5),
    "values apart": DeviceHeadShape(8, 2, 96, 64, 16, 0.1),
    "wide": DeviceHeadShape(4, 1, 256, 256, 16, 256**-0.5),
    "window": replace(LLAMA, window=70),
    "softcap": replace(LLAMA, softcap=1.5),
}
SPANS: Mapping[str, list[tuple[int, int]]] = {
    "decodes": [(0, 1), (15, 1), (16, 1), (511, 1), (700, 1)],
    "one decode": [(700, 1)],
    "prompts": [(0, 70), (0, 1), (0, 16)],
    "chunks and decodes": [(33, 200), (129, 1), (0, 64), (500, 1), (64, 65)],
}


def compare(
    shape: DeviceHeadShape, spans: list[tuple[int, int]], device: torch.device, **options: Any
) -> float:
    """Return the error of `attend`, over rows described as a stage describes them."""
    sinks, ring = options.get("sinks"), options.get("ring")
    drawn = draw_rows(shape, spans, device, ring=ring)
    rows = [
        (Row(i, start, length, 1), BlockTable([blocks]))
        for i, (start, length, blocks) in enumerate(drawn.rows)
    ]
    host = describe_rows(rows, 1, shape.block_size)
    nothing = np.empty(0, np.int32)
    batch, _ = on_device(host, nothing, [shape], device, options.get("num_units", 132))
    found = attend(
        *(drawn.query, drawn.pool, shape),
        tables=batch.tables,
        rows=batch.groups[0].rows,
        launches=batch.groups[0].launches,
        sinks=sinks,
    )
    return error_of(found, attend_slowly(drawn.query, drawn.pool, shape, drawn.rows, sinks))


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("kind", SHAPES)
def test_attention_over_blocks_is_attention(kind: str, spans: str, device: torch.device) -> None:
    if INTERPRETED and kind not in {"odd", "values apart", "window", "softcap"}:
        pytest.skip("too slow for the interpreter")
    assert compare(SHAPES[kind], SPANS[spans], device) <= TOLERANCE


@pytest.mark.parametrize("num_units", [1, 4, 132])
def test_the_keys_of_a_token_may_be_split_among_programs(num_units: int, device: torch.device) -> None:
    shape = SHAPES["odd"]
    assert compare(shape, [(300, 1), (3, 1)], device, num_units=num_units) <= TOLERANCE


def test_great_scores_do_not_leave_the_range_of_numbers(device: torch.device) -> None:
    shape = replace(SHAPES["odd"], scale=20.0)  # to powers of two beyond 500
    assert compare(shape, [(300, 1), (40, 20)], device) <= TOLERANCE


@pytest.mark.parametrize("spans", ["one decode", "chunks and decodes"])
def test_a_sink_takes_its_share_and_gives_nothing(spans: str, device: torch.device) -> None:
    shape = SHAPES["odd"]
    sinks = torch.linspace(-2, 4, shape.num_heads, device=device) * LOG2_E
    assert compare(shape, SPANS[spans], device, sinks=sinks) <= TOLERANCE


def test_a_table_of_a_window_may_be_a_ring(device: torch.device) -> None:
    shape = replace(SHAPES["odd"], window=40)
    spans = [(200, 1), (130, 20), (5, 1)]
    assert compare(shape, spans, device, ring=5) <= TOLERANCE


def test_padding_of_a_captured_batch_is_left_alone(device: torch.device) -> None:
    shape = SHAPES["odd"]
    drawn = draw_rows(shape, [(40, 1)], device)
    (start, length, blocks) = drawn.rows[0]
    host = describe_rows([(Row(0, start, length, 1), BlockTable([blocks]))], 1, shape.block_size).padded(4)
    assert host.slots.tolist() == [[blocks[40 // 16] * 16 + 40 % 16, -1, -1, -1]]
    assert host.rows.tolist() == [[[0, 1, 40, 0, 3], [0] * 5, [0] * 5, [0] * 5]]
