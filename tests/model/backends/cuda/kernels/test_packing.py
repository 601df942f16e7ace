"""Matrices in the form of a file: repacked for a card without a change of values. No card is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from convoy.config.kernels import CARD_FORMS, KEPT_FORMS, card_bytes
from convoy.model.backends.cuda.kernels.packing import ROWS, has_layout, pack_matrix
from convoy.model.kernels.stored.matrix import StoredMatrix, StoredRange, is_shared
from convoy.model.kernels.stored.sample import sample_range, usual_shape

HOST = torch.device("cpu")
# Rows of 768 have no whole number of super-blocks in each half.
SIZES = (512, 768)
WITHOUT = {
    *("BF16", "F16", "F8_E5M2", "NF4", "gguf:NVFP4", "gguf:TQ1_0", "gguf:TQ2_0"),
    *(f"centred{bits} zeros places" for bits in (2, 4, 8)),
    *(f"gguf:IQ{name}" for name in ("1_S", "1_M", "2_XXS", "2_XS", "2_S", "3_XXS", "3_S")),
}


def stored(form: str, inputs: int, outputs: int = 70) -> StoredRange:
    return replace(sample_range(usual_shape(form, inputs), outputs), rounded="")


def test_every_form_has_a_layout_except_those_that_the_documentation_names() -> None:
    found = {form for form in KEPT_FORMS if not has_layout(StoredMatrix((stored(form, 512),)))}
    assert found == WITHOUT
    assert ROWS.keys() == CARD_FORMS.keys(), "the plan knows the same forms"


@pytest.mark.parametrize("form", sorted(KEPT_FORMS - WITHOUT))
def test_a_form_on_the_card_has_the_values_of_the_file_in_the_bytes_of_the_plan(form: str) -> None:
    for inputs in SIZES:
        one = stored(form, inputs)
        found = pack_matrix(StoredMatrix((one,)), HOST)
        assert torch.equal(found.dense(), one.unpack())
        kept = sum(part.nbytes for role, part in one.parts.items() if not is_shared(role))
        assert found.nbytes == card_bytes(one.form, one.outputs * inputs, inputs, kept)


def test_the_smallest_and_largest_exponents_of_mxfp4_are_exact() -> None:
    one = stored("MXFP4", 256, 4)
    for exponent in (0, 1, 2, 127, 253):
        one.parts["scales"].fill_(exponent)
        assert torch.equal(pack_matrix(StoredMatrix((one,)), HOST).dense(), one.unpack())


def test_inputs_that_fill_no_unit_have_no_layout() -> None:
    one = stored("centred8", 64 + 16)
    assert not has_layout(StoredMatrix((replace(one, group=16),)))
    assert card_bytes("centred8", 70 * 80, 80, one.num_bytes) == 0
