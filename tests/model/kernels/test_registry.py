"""The modules that the rows of kernels and families name."""

from __future__ import annotations

import pytest
from torch import nn

from convoy.config.kernels import ROUNDED
from convoy.model.kernels.registry import LinearKernel, linear_kernel, rounded_kernels
from convoy.model.loading.load import replacement
from convoy.plan.spec.registry import FAMILIES


@pytest.mark.parametrize("name", ROUNDED)
def test_a_rounded_kernel_names_a_module_that_offers_it(name: str) -> None:
    assert isinstance(linear_kernel(name), LinearKernel)


def test_rounded_kernels_that_work_here_come_in_the_order_of_the_rows() -> None:
    found = rounded_kernels()
    assert found == [name for name in ROUNDED if name in found]


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.replaced])
def test_a_part_that_a_family_replaces_is_a_module_of_ours(name: str) -> None:
    for place in FAMILIES[name].replaced.values():
        found = replacement(place)
        assert isinstance(found, type)
        assert issubclass(found, nn.Module)
