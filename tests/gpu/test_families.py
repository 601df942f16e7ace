"""The kernels of single families against plain torch: latents, experts and recurrent states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from convoy.model.kv.delta_batch import DeltaShape
from convoy.model.kv.pools import BlockTable
from convoy.wire.messages.control import Row
from support.kernels import INTERPRETED, draw_rows, error_of, why_not

if why_not() is not None:
    pytest.skip(str(why_not()), allow_module_level=True)

from convoy.model.backends.cuda.batch import describe_rows, on_device
from convoy.model.backends.cuda.kernels.attention import DeviceHeadShape, Pool
from convoy.model.backends.cuda.layers.delta import DeviceStatePool, SlotRows, convolve, run_states
from convoy.model.backends.cuda.layers.experts import cut_by_expert, multiply_by_experts, sort_by_expert
from convoy.model.backends.cuda.layers.latent import MAX_PART, attend_latents, num_parts
from support.slow_kernels import attend_slowly

pytestmark = pytest.mark.gpu
# For bfloat16: its numbers lie at most 2^-9 apart.
TOLERANCE = 1e-2
LATENTS: Mapping[str, DeviceHeadShape] = {
    "deepseek": DeviceHeadShape(128, num_parts(128), 576, 512, 16, 192**-0.5),
    "tiny": DeviceHeadShape(4, 1, 20, 16, 16, 0.2),
    "narrow": DeviceHeadShape(4, 1, 26, 20, 16, 0.2),
    "parts": DeviceHeadShape(6, 2, 40, 24, 16, 0.2),
    "window": DeviceHeadShape(4, 1, 20, 16, 16, 0.2, window=40),
}
SPANS: Mapping[str, Sequence[tuple[int, int]]] = {
    "decodes": [(0, 1), (15, 1), (16, 1), (310, 1)],
    "one decode": [(700, 1)],
    "chunks and decodes": [(33, 70), (129, 1), (0, 16)],
}


def test_heads_are_cut_into_equal_parts_that_fit_a_tile() -> None:
    for num_heads in (1, 4, 64, 96, 128, 130):
        parts = num_parts(num_heads)
        assert num_heads % parts == 0
        assert num_heads // parts <= MAX_PART


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("kind", LATENTS)
def test_attention_over_latents_is_attention(kind: str, spans: str, device: torch.device) -> None:
    if INTERPRETED and (kind == "deepseek" or spans == "one decode"):
        pytest.skip("too slow for the interpreter")
    shape = LATENTS[kind]
    whole = replace(shape, num_kv_heads=1)
    ring = 9 if shape.window and spans != "chunks and decodes" else None
    drawn = draw_rows(whole, list(SPANS[spans]), device, ring=ring)
    rows = [
        (Row(i, start, length, 1), BlockTable([blocks]))
        for i, (start, length, blocks) in enumerate(drawn.rows)
    ]
    host = describe_rows(rows, 1, shape.block_size)
    batch, _ = on_device(host, np.empty(0, np.int32), [shape], device, 132)
    latents = drawn.pool.keys
    found = attend_latents(
        drawn.query.view(-1, shape.num_heads, shape.head_dim),
        *(latents, shape),
        tables=batch.tables,
        rows=batch.groups[0].rows,
        launches=batch.groups[0].launches,
    )
    pool = Pool(latents, latents[..., : shape.value_dim])
    expected = attend_slowly(drawn.query, pool, whole, drawn.rows)
    assert error_of(found.flatten(1), expected) <= TOLERANCE


def choices(num_rows: int, num_experts: int, chosen: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(num_rows, num_experts, generator=generator)
    # Most rows prefer the first experts, so that some experts have several tiles and others have none.
    return (scores + torch.linspace(1, 0, num_experts)).topk(chosen).indices.to(device)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "num_experts", "chosen"), [(1, 6, 2), (5, 6, 2), (70, 6, 3), (40, 3, 1), (33, 128, 8)]
)
def test_each_row_meets_the_experts_that_it_chose(
    num_rows: int, num_experts: int, chosen: int, is_transposed: bool, device: torch.device
) -> None:
    if INTERPRETED and num_experts > 6:
        pytest.skip("too slow for the interpreter")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (
        torch.randn(*size, generator=generator).to(device, dtype)
        for size in ((num_rows, 40), (num_experts, 72, 40), (num_experts, 72))
    )
    numbers = choices(num_rows, num_experts, chosen, device)
    stack = weight.transpose(1, 2).contiguous() if is_transposed else weight
    tiles = cut_by_expert(numbers, num_experts)
    found = multiply_by_experts(x, stack, tiles, bias=bias, is_transposed=is_transposed, chosen=chosen)
    flat = numbers.view(-1)
    rows = x.repeat_interleave(chosen, dim=0).float()
    expected = torch.einsum("poi,pi->po", weight[flat].float(), rows) + bias[flat].float()
    assert error_of(found, expected) <= TOLERANCE


@pytest.mark.parametrize(("num_rows", "num_experts", "chosen"), [(1, 6, 2), (70, 6, 3), (250, 128, 8)])
def test_tiles_hold_each_pair_once_under_its_expert(
    num_rows: int, num_experts: int, chosen: int, device: torch.device
) -> None:
    numbers = choices(num_rows, num_experts, chosen, device)
    flat = numbers.view(-1).tolist()
    for cut in (cut_by_expert, sort_by_expert):
        tiles = cut(numbers, num_experts)
        order, seen = tiles.order.tolist(), []
        for expert, first, end in tiles.tiles.tolist():
            assert end - first <= 16
            seen += [order[place] for place in range(first, end)]
            assert {flat[order[place]] for place in range(first, end)} <= {expert}
        assert sorted(seen) == list(range(len(flat)))


def test_a_row_has_the_same_product_beside_others_and_alone(device: torch.device) -> None:
    if INTERPRETED:
        pytest.skip("the interpreter multiplies with NumPy")
    dtype = torch.bfloat16
    x = torch.randn(20, 40, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    weight = torch.randn(6, 72, 40, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    numbers = choices(20, 6, 2, device)
    together = multiply_by_experts(
        x, weight, cut_by_expert(numbers, 6), bias=None, is_transposed=False, chosen=2
    )
    alone = multiply_by_experts(
        x[7:8], weight, cut_by_expert(numbers[7:8], 6), bias=None, is_transposed=False, chosen=2
    )
    assert torch.equal(together[14:16], alone)


DELTA = DeltaShape(num_heads=4, num_key_heads=2, key_dim=24, value_dim=20, num_taps=4)


class Recurrence:
    """Run rows on slots that lie apart, as a stage does."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(11)
        self.taps = torch.randn(4, DELTA.mixed_width, generator=generator).to(device)
        self.a_log = torch.randn(4, generator=generator).to(device)
        self.dt_bias = torch.randn(4, generator=generator).to(device)
        self.pool = DeviceStatePool(DELTA, 8, device)
        # Slots keep what an earlier sequence left.
        self.pool.past.fill_(7.0)
        self.pool.states.fill_(3.0)
        self._device = device

    def run(self, mixed: torch.Tensor, gates: torch.Tensor, *rows: tuple[int, int, int]) -> torch.Tensor:
        """Run (slot, start, tokens) rows. Returns [T, heads, value_dim]."""
        shape = DeviceHeadShape(DELTA.num_heads, DELTA.num_key_heads, DELTA.key_dim, DELTA.value_dim, 16, 1.0)
        described = [
            (Row(i, start, count, 1), BlockTable([[slot]])) for i, (slot, start, count) in enumerate(rows)
        ]
        host = describe_rows(described, 1, 16)
        batch, _ = on_device(host, np.empty(0, np.int32), [shape], self._device, 132)
        group = batch.groups[0]
        slots = SlotRows(batch.tables, group.rows, group.launches, shape.group)
        turned = convolve(mixed, self.taps, self.pool, slots)
        return run_states(turned, gates, self.a_log, self.dt_bias, self.pool, slots)

    def slowly(self, mixed: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Return the same for one sequence from its start, token by token."""
        shape, num_tokens = DELTA, len(mixed)
        wide = torch.cat((mixed.new_zeros(3, shape.mixed_width), mixed))
        taps = [wide[tap : tap + num_tokens] * self.taps[tap] for tap in range(4)]
        turned = torch.nn.functional.silu(torch.stack(taps).sum(0))
        widths = [shape.key_width, shape.key_width, shape.value_width]
        query, key, value = torch.split(turned, widths, dim=-1)
        query, key = (
            torch.nn.functional.normalize(x.view(num_tokens, 2, -1), dim=-1).repeat_interleave(2, dim=1)
            for x in (query, key)
        )
        value = value.view(num_tokens, 4, -1)
        share = torch.sigmoid(gates[:, :4])
        decay = torch.exp(-self.a_log.exp() * torch.nn.functional.softplus(gates[:, 4:] + self.dt_bias))
        state = mixed.new_zeros(4, shape.key_dim, shape.value_dim)
        found = []
        for token in range(num_tokens):
            state = state * decay[token, :, None, None]
            known = torch.einsum("hkv,hk->hv", state, key[token])
            change = (value[token] - known) * share[token, :, None]
            state = state + key[token, :, :, None] * change[:, None]
            found.append(torch.einsum("hkv,hk->hv", state, query[token]) * shape.key_dim**-0.5)
        return torch.stack(found)


def inputs(num_tokens: int, seed: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(num_tokens, DELTA.mixed_width, generator=generator)
    return mixed.to(device), torch.randn(num_tokens, 8, generator=generator).to(device)


def test_states_in_chunks_of_any_size_are_the_recurrence(device: torch.device) -> None:
    one = Recurrence(device)
    (mixed, gates), (others, their_gates) = inputs(29, 1, device), inputs(9, 2, device)
    found, theirs, done, past = [], [], 0, 0
    for count, beside in ((1, 0), (2, 0), (1, 2), (16, 1), (1, 1), (1, 0), (7, 5)):
        rows = [(5, done, count), (2, past, beside)] if beside else [(5, done, count)]
        both = torch.cat((mixed[done : done + count], others[past : past + beside]))
        out = one.run(both, torch.cat((gates[done : done + count], their_gates[past : past + beside])), *rows)
        found.append(out[:count])
        theirs.append(out[count:])
        done, past = done + count, past + beside
    assert error_of(torch.cat(found), one.slowly(mixed, gates)) <= 1e-4
    assert error_of(torch.cat(theirs), one.slowly(others, their_gates)) <= 1e-4


def test_a_copied_slot_goes_on_as_its_source(device: torch.device) -> None:
    one = Recurrence(device)
    mixed, gates = inputs(8, 3, device)
    one.run(mixed[:6], gates[:6], (1, 0, 6))
    one.pool.copy(1, 4)
    found = one.run(mixed[6:], gates[6:], (4, 6, 2))
    assert error_of(found, one.slowly(mixed, gates)[6:]) <= 1e-4


def test_padding_of_a_captured_batch_changes_no_slot(device: torch.device) -> None:
    one = Recurrence(device)
    shape = DeviceHeadShape(4, 2, 24, 20, 16, 1.0)
    host = describe_rows([(Row(0, 0, 1, 1), BlockTable([[3]]))], 1, 16).padded(4)
    tiles = torch.tensor([[row, 0] for row in range(4)], dtype=torch.int32, device=device)
    batch, _ = on_device(host, np.empty(0, np.int32), [shape], device, 132)
    (launch,) = batch.groups[0].launches
    slots = SlotRows(batch.tables, batch.groups[0].rows, (replace(launch, tiles=tiles),), shape.group)
    mixed, gates = inputs(4, 4, device)
    before = one.pool.states.clone(), one.pool.past.clone()
    turned = convolve(mixed, one.taps, one.pool, slots)
    run_states(turned, gates, one.a_log, one.dt_bias, one.pool, slots)
    kept = [slot for slot in range(8) if slot != 3]
    assert torch.equal(one.pool.states[kept], before[0][kept])
    assert torch.equal(one.pool.past[kept], before[1][kept])
    assert not torch.equal(one.pool.states[3], before[0][3])
