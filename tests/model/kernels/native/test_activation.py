"""Test compiled `exp` and activations: torch's bits on every instruction set, and what is left to torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from convoy.model.kernels.activation import activate
from convoy.model.kernels.native import library
from convoy.model.kernels.native.activation import (
    NATIVE_ACTIVATIONS,
    exp_library,
    exp_sample,
    native_activate,
    native_exp,
)
from support.compiled import faulty, nothing_compiled
from support.tiny_models import Threads

pytestmark = pytest.mark.skipif(
    library.native_library() is None, reason=f"nothing is compiled here: {library.why_no_native()}"
)


@pytest.fixture(params=list(library.native_libraries()), ids=lambda one: one.instruction_set.name)
def compiled(request: pytest.FixtureRequest) -> Iterator[library.NativeLibrary]:
    """Each instruction set's library, with the choice of `exp` as it was afterwards."""
    yield request.param
    assert exp_library.__wrapped__((request.param,)) is request.param


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def test_exp_has_torchs_bits_for_numbers_of_all_sizes_anywhere(compiled: library.NativeLibrary) -> None:
    assert exp_library((compiled,)) is compiled
    sample = exp_sample()
    assert {float("inf"), -float("inf"), 0.0} <= set(sample[-512:].tolist())
    expected = torch.exp(sample)
    assert same_bits(native_exp(compiled, sample), expected)
    for size in (1, 7, 8, 15, 17, 1025):
        part = slice(20_000, 20_000 + size)
        assert same_bits(native_exp(compiled, sample[part].clone()), expected[part])


def test_the_formula_for_torch_without_mkl_errs_by_one_unit_at_most(compiled: library.NativeLibrary) -> None:
    compiled.convoy_use_exp(None)
    x = exp_sample()
    found, true = native_exp(compiled, x), torch.exp(x.double())
    usual = (true > 1e-37) & (true < 3e38)
    units = torch.exp2(torch.floor(torch.log2(true[usual])) - 23)
    assert ((found[usual].double() - true[usual]).abs() / units).max() <= 1.0
    assert same_bits(
        found[~usual & (true > 3.5e38)], torch.full_like(found[~usual & (true > 3.5e38)], torch.inf)
    )
    assert not found[true < 1e-46].any()
    assert found[x.isnan()].isnan().all()


def test_exp_with_other_bits_goes_to_the_next_library() -> None:
    right = list(library.native_libraries())
    wrong = faulty(right[0], "convoy_activate", output=4)
    assert exp_library((wrong, right[-1])) is right[-1]
    assert exp_library((wrong,)) is None


@pytest.mark.parametrize("activation", sorted(NATIVE_ACTIVATIONS))
@pytest.mark.parametrize("shape", [(3, 5), (2, 40_000)])
def test_activations_have_the_bits_of_torchs_operators(
    activation: str, shape: tuple[int, int], threads: Threads
) -> None:
    generator = torch.Generator().manual_seed(1)
    x, factor = (5 * torch.randn(*shape, generator=generator) for _ in range(2))
    with nothing_compiled():
        expected = activate(x.clone(), activation)
    for count in (1, 2):
        threads(count)
        assert torch.equal(activate(x.clone(), activation), expected)
        product = x.clone()
        assert native_activate(product, activation, factor)
        assert torch.equal(product, expected * factor)


def test_other_activations_types_and_layouts_are_left_to_torch() -> None:
    x = torch.randn(6, 8)
    kept = x.clone()
    assert not native_activate(x, "gelu")
    assert not native_activate(x.t(), "silu")
    assert not native_activate(x, "silu", torch.randn(8, 6).t())
    assert not native_activate(x.to(torch.bfloat16), "silu")
    assert torch.equal(x, kept)
    assert torch.equal(
        activate(x.t().clone(memory_format=torch.preserve_format), "silu"), activate(x, "silu").t()
    )
