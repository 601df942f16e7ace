"""Test pools in every dtype of K/V: a value is rounded once, by itself, and no number is infinite."""

from __future__ import annotations

import pytest
import torch

from convoy.model.kv.packed import HeadShape
from convoy.model.kv.pool import KvPool, make_pool

DTYPES = ("f32", "bf16", "f16", "q8")
NUM_BLOCKS, NUM_HEADS, BLOCK, DIM = 3, 2, 16, 64
EVERY_BLOCK = torch.arange(NUM_BLOCKS)


def pool_of(kv_dtype: str) -> KvPool:
    return KvPool(NUM_BLOCKS, NUM_HEADS, BLOCK, DIM, kv_dtype)


def numbers(scale: float = 1.0) -> torch.Tensor:
    """Return K and V of all positions: [2, positions, heads, dim]."""
    generator = torch.Generator().manual_seed(4)
    return scale * torch.randn(2, NUM_BLOCKS * BLOCK, NUM_HEADS, DIM, generator=generator)


@pytest.mark.parametrize("scale", [1e-30, 3e-7, 1e-3, 1.0, 900.0, 1e7, 1e38])
@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_what_was_read_is_written_again_without_a_change(kv_dtype: str, scale: float) -> None:
    first, second = pool_of(kv_dtype), pool_of(kv_dtype)
    first.write_blocks(EVERY_BLOCK, numbers(scale))
    once = first.read_blocks(EVERY_BLOCK)
    second.write_blocks(EVERY_BLOCK, once)
    assert torch.equal(second.read_blocks(EVERY_BLOCK), once)
    assert torch.isfinite(once).all()


@pytest.mark.parametrize(("kv_dtype", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_two_bytes_round_to_the_nearest_number(kv_dtype: str, dtype: torch.dtype) -> None:
    pool = pool_of(kv_dtype)
    pool.write_blocks(EVERY_BLOCK, numbers())
    assert torch.equal(pool.read_blocks(EVERY_BLOCK), numbers().to(dtype).float())


def test_eight_bits_are_within_half_a_step_of_their_groups_greatest() -> None:
    pool = pool_of("q8")
    pool.write_blocks(EVERY_BLOCK, numbers())
    apart = (pool.read_blocks(EVERY_BLOCK) - numbers()).abs().view(-1, 32).amax(-1)
    greatest = numbers().abs().view(-1, 32).amax(-1)
    # Beside half a step, a scale's own rounding moves the greatest value by up to 2^-11 of it.
    assert (apart <= greatest * (0.5 / 127 + 2.0**-11)).all()
    assert (apart > greatest * 0.4 / 127).any()


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_a_row_has_the_same_numbers_beside_any_others(kv_dtype: str) -> None:
    together, alone = pool_of(kv_dtype), pool_of(kv_dtype)
    rows, values = torch.tensor([9, 4, 70, 33]), numbers()[0, :2].reshape(4, DIM)
    together.write(rows, values)
    for index in (2, 0, 3, 1):
        alone.write(rows[index : index + 1], values[index : index + 1])
    assert torch.equal(together.all_rows, alone.all_rows)
    assert not together.all_rows[[8, 10, 69]].any()


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_no_number_of_a_broken_sequence_stays_in_a_pool(kv_dtype: str) -> None:
    pool = pool_of(kv_dtype)
    values = torch.zeros(1, DIM)
    values[0, :4] = torch.tensor([float("nan"), float("inf"), float("-inf"), 3.4028235e38])
    pool.write(torch.tensor([5]), values)
    found = pool.all_rows[5]
    assert torch.isfinite(found).all()
    assert found[0] == 0.0
    assert found[1] == found[3] == -found[2]


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("latent", [False, True])
def test_keys_and_values_of_two_widths_are_rounded_alike(kv_dtype: str, latent: bool) -> None:
    shape = HeadShape(4, 1, 96, BLOCK, NUM_BLOCKS, value_dim=32, latent=latent, kv_dtype=kv_dtype)
    pool, plain = make_pool(shape), pool_of(kv_dtype)
    width = 96 if latent else 128
    rows = torch.arange(BLOCK)
    values = numbers()[0, :BLOCK].reshape(BLOCK, -1)[:, :width]
    pool.write(rows, values)
    keys, found = pool.gather(torch.tensor([0]), BLOCK)
    assert keys.shape == (1, BLOCK, 96)
    plain.write(rows, values[:, :64])
    assert torch.equal(keys[0, :, :64], plain.all_rows[:BLOCK])
    assert torch.equal(found[0], keys[0, :, :32]) == latent
