"""Test embeddings over stored matrices: packed blocks give the reader's values, in no more memory."""

from __future__ import annotations

import pytest
import torch

from convoy.model.kernels.native.library import native_library, why_no_native
from convoy.model.kernels.stored.embedding import StoredEmbedding
from convoy.model.kernels.stored.matrix import StoredMatrix, StoredRange
from convoy.model.kernels.stored.sample import sample_range, usual_shape

TOKENS = torch.tensor([0, 63, 64, 127, 5, 5])


@pytest.mark.skipif(native_library() is None, reason=f"nothing is compiled here: {why_no_native()}")
@pytest.mark.parametrize("form", ["gguf:Q4_0", "gguf:Q8_0", "gguf:Q4_K", "gguf:Q6_K"])
def test_blocks_of_ggml_are_packed_with_the_readers_values(form: str) -> None:
    one = sample_range(usual_shape(form, 512), 128)
    table = StoredEmbedding(StoredMatrix((one,)))
    expected = table(TOKENS)
    assert torch.equal(expected, one.unpack()[TOKENS])
    table.own_memory()
    assert table.matrix is None
    assert table.num_bytes == one.num_bytes
    assert torch.equal(table(TOKENS), expected)


def test_other_forms_are_copied_as_they_are() -> None:
    one = sample_range(usual_shape("affine4", 512), 128)
    table = StoredEmbedding(StoredMatrix((one,)))
    table.own_memory()
    assert table.matrix is not None
    (held,) = table.matrix.ranges
    assert isinstance(held, StoredRange)
    copies = zip(held.parts.values(), one.parts.values(), strict=True)
    assert all(copy.data_ptr() != part.data_ptr() for copy, part in copies)
    assert torch.equal(table(TOKENS), one.unpack()[TOKENS])
