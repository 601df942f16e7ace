"""The modules that the rows of families name."""

from __future__ import annotations

import pytest
from torch import nn

from convoy.model.loading.load import replacement
from convoy.plan.spec.registry import FAMILIES


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.replaced])
def test_a_part_that_a_family_replaces_is_a_module_of_ours(name: str) -> None:
    for place in FAMILIES[name].replaced.values():
        found = replacement(place)
        assert isinstance(found, type)
        assert issubclass(found, nn.Module)
