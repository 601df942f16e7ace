"""The likeliest token of each row, found where the logits are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from convoy.model.gpu.drawing import best_tokens

_DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", _DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_equal_logits_the_lowest_token_is_drawn(device: str, dtype: torch.dtype) -> None:
    logits = torch.randn(40, 3000, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[3] = 1.5
    logits[4, [17, 2900]] = 9.0
    tokens, num_bad = best_tokens(logits.to(device))
    expected = [int(np.argmax(row.float().numpy())) for row in logits]
    assert tokens.tolist() == expected
    assert expected[3:5] == [0, 17]
    assert not num_bad.any()


def test_a_row_that_is_not_finite_is_counted_and_no_rows_give_none() -> None:
    logits = torch.zeros(3, 10)
    logits[1, 2], logits[1, 5] = float("nan"), float("inf")
    assert best_tokens(logits)[1].tolist() == [0, 2, 0]
    tokens, num_bad = best_tokens(torch.zeros(0, 10))
    assert tokens.shape == num_bad.shape == (0,)
