"""Test the formulas of `exp` and others: their errors, and their bits in compiled code and by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from convoy.model.kernels.activation import ACTIVATIONS, activate, exp_, softplus
from convoy.model.kernels.native import formulas, library
from convoy.model.kernels.native.activation import (
    Activation,
    exp_library,
    exp_sample,
    native_activate,
    native_apply,
)
from support.compiled import faulty, nothing_compiled
from support.tiny_models import Threads

needs_compiled = pytest.mark.skipif(
    library.native_library() is None, reason=f"nothing is compiled here: {library.why_no_native()}"
)


@pytest.fixture(params=list(library.native_libraries()), ids=lambda one: one.instruction_set.name)
def compiled(request: pytest.FixtureRequest) -> Any:
    """Each instruction set's library."""
    return request.param


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    same = a.view(torch.int32) == b.view(torch.int32)
    return bool((same | (a.isnan() & b.isnan())).all())


def units(found: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Return the errors in units in the last place, those of denormal numbers included."""
    exponents = torch.frexp(true)[1].clamp(min=-125).to(torch.float64)
    return (found.double() - true).abs() * torch.exp2(24 - exponents)


@pytest.mark.parametrize(
    ("function", "true", "most"),
    [
        ("exp", torch.exp, 0.98),
        ("expm1", torch.expm1, 1.6),
        ("tanh", torch.tanh, 2.5),
        ("erf", torch.erf, 1.4),
    ],
)
def test_a_formula_errs_by_few_units(
    function: str, true: Callable[[torch.Tensor], torch.Tensor], most: float
) -> None:
    sample = exp_sample()
    x = sample[(sample.abs() < 88) & (sample > -103)]
    assert len(x) > 20_000
    assert units(formulas.FORMULAS[function](x), true(x.double())).max() <= most


def test_exp_of_special_numbers_is_that_of_ieee() -> None:
    infinity = float("inf")
    x = torch.tensor(
        [0.0, -0.0, infinity, -infinity, 88.72283, 88.722839, 3e38, -103.97, -103.973, -3e38, 1e-45]
    )
    found = formulas.exp(x).tolist()
    assert found[:4] == [1.0, 1.0, infinity, 0.0]
    assert 3.4e38 < found[4] < infinity
    assert found[5:7] == [infinity, infinity]
    assert found[7:] == [2.0**-149, 0.0, 0.0, 1.0]
    assert formulas.exp(torch.tensor([float("nan")])).isnan().all()


def test_exp_never_falls_where_its_reduction_changes() -> None:
    # On both sides of each half multiple of ln 2, where q changes.
    edges = ((torch.arange(-150, 128).double() + 0.5) * 0.6931471805599453).float()
    near = (edges.view(torch.int32)[:, None] + torch.arange(-64, 65, dtype=torch.int32)).view(torch.float32)
    x = near.flatten().sort()[0]
    found = formulas.exp(x)
    assert len(x) > 30_000
    assert (found[1:] >= found[:-1]).all()


def test_softplus_is_the_nearest_float_to_that_of_its_exp() -> None:
    x = exp_sample()
    x = x[x.isfinite()]
    assert units(softplus(x), torch.nn.functional.softplus(x.double(), threshold=40)).max() <= 1.5
    assert softplus(torch.tensor([-float("inf"), float("inf")])).tolist() == [0.0, float("inf")]


@needs_compiled
def test_compiled_functions_have_the_formulas_bits_anywhere(compiled: library.NativeLibrary) -> None:
    assert exp_library((compiled,)) is compiled
    sample = exp_sample()
    assert {float("inf"), -float("inf"), 0.0} <= set(sample.tolist())
    expected = formulas.exp(sample)
    for size in (1, 7, 8, 15, 17, 1025, 40_000):
        part = slice(10, 10 + size)
        assert same_bits(native_apply(compiled, "exp", sample[part].clone()), expected[part])


@needs_compiled
def test_functions_with_other_bits_go_to_the_next_library() -> None:
    right = list(library.native_libraries())
    wrong = faulty(right[0], "convoy_apply", output=0)
    assert exp_library((wrong, right[-1])) is right[-1]
    assert exp_library((wrong,)) is None


@needs_compiled
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
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
        assert native_activate(product, Activation(activation), factor)
        assert torch.equal(product, expected * factor)


@needs_compiled
def test_other_types_and_layouts_are_left_to_torch() -> None:
    x = torch.randn(6, 8)
    kept, silu = x.clone(), Activation("silu")
    assert not native_activate(x.t(), silu)
    assert not native_activate(x, silu, torch.randn(8, 6).t())
    assert not native_activate(x.to(torch.bfloat16), silu)
    assert torch.equal(x, kept)
    turned: Any = x.t().clone(memory_format=torch.preserve_format)
    assert torch.equal(activate(turned, "silu"), activate(x.clone(), "silu").t())
    assert torch.equal(exp_(x.t().clone(memory_format=torch.preserve_format)), exp_(x.clone()).t())
