"""Packed linears meet few counts of rows, because oneDNN keeps code for each; padding changes no bit."""

from __future__ import annotations

import torch

from convoy.model.kernels.linear import LEAST_ROWS, pad_rows, padded_count


def test_few_counts_serve_all_and_none_is_far_or_too_small() -> None:
    counts = {num_rows: padded_count(num_rows) for num_rows in range(1, 1025)}
    assert len(set(counts.values())) <= 64
    assert counts[1] == LEAST_ROWS
    for num_rows, padded in counts.items():
        assert num_rows <= padded <= max(LEAST_ROWS, num_rows * 9 // 8)
        assert padded_count(padded) == padded


def test_padding_repeats_the_last_row_and_leaves_what_needs_none() -> None:
    x = torch.arange(34.0).view(17, 2)
    padded = pad_rows(x)
    assert padded.shape == (18, 2)
    assert torch.equal(padded[:17], x)
    assert torch.equal(padded[17], x[16])
    assert pad_rows(padded) is padded
