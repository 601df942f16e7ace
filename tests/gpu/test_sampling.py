"""The likeliest token of each row, found where the logits are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.kernels import why_not

if why_not() is not None:
    pytest.skip(str(why_not()), allow_module_level=True)

from convoy.model.backends.cuda.memory.staging import Staging
from convoy.model.backends.cuda.sampling import best_tokens, start_sampling
from convoy.model.constraints.matcher import mask_bytes
from convoy.model.sampling.output_rows import SampleJob, sample_all
from convoy.model.sampling.params import SamplingParams

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("width", [3000, 20000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_equal_logits_the_lowest_token_is_drawn(
    width: int, dtype: torch.dtype, device: torch.device
) -> None:
    logits = torch.randn(40, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[3] = 1.5
    logits[4, [17, 2900]] = 9.0
    tokens, num_bad = best_tokens(logits.to(device))
    expected = [int(np.argmax(row.float().numpy())) for row in logits]
    assert tokens.tolist() == expected
    assert expected[3:5] == [0, 17]
    assert not num_bad.any()


@pytest.mark.parametrize("width", [3000, 20000])
def test_the_best_token_is_one_of_the_mask(width: int, device: torch.device) -> None:
    random = np.random.default_rng(4)
    logits = torch.randn(9, width, generator=torch.Generator().manual_seed(1))
    allowed = random.random((9, width)) < 0.002
    allowed[:, [0, 31, 32, width - 1]] |= np.eye(9, 4, dtype=bool)
    allowed[4] = True
    allowed[5], allowed[5, 7] = False, True
    allowed[~allowed.any(axis=1), 3] = True
    padded = np.zeros((9, mask_bytes(width) * 8), dtype=bool)
    padded[:, :width] = allowed
    masks = torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))
    tokens, num_bad = best_tokens(logits.to(device), masks.to(device))
    assert tokens.tolist() == np.where(allowed, logits.numpy(), -np.inf).argmax(axis=1).tolist()
    assert not num_bad.any()


def test_a_row_that_is_not_finite_is_counted_and_no_rows_give_none(device: torch.device) -> None:
    logits = torch.zeros(3, 10, device=device)
    logits[1, 2], logits[1, 5] = float("nan"), float("inf")
    assert best_tokens(logits)[1].tolist() == [0, 2, 0]
    tokens, num_bad = best_tokens(torch.zeros(0, 10, device=device))
    assert tokens.shape == num_bad.shape == (0,)


def test_restricted_tokens_are_those_of_the_host(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("draws are copied by streams of a device")
    logits = torch.randn(8, 3000, generator=torch.Generator().manual_seed(2))
    size = mask_bytes(3000)
    greedy, best = SamplingParams(temperature=0.0), [int(row.argmax()) for row in logits]
    draws = [
        SampleJob(greedy, 0, 1),
        SampleJob(greedy, 0, 2, banned=[best[1]]),
        SampleJob(greedy, 0, 3, allowed=[7, 8, 2999]),
        SampleJob(SamplingParams(seed=3), 1, 4, allowed=[5, 6]),
        SampleJob(SamplingParams(seed=3, logit_bias={9: 50.0}), 0, 5, banned=[9]),
        SampleJob(greedy, 0, 6, score=best[5]),
        SampleJob(greedy, 0, 7, mask=(0b1011 << 60).to_bytes(size, "little")),
        SampleJob(SamplingParams(seed=3), 0, 8, mask=(1 << 2999).to_bytes(size, "little")),
    ]
    copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    found = start_sampling(logits.to(device), draws, copies, Staging(device)).outcomes()
    expected = sample_all(logits.numpy(), draws)
    assert [one.sampled.token_id for one in found] == [one.sampled.token_id for one in expected]
    assert found[1].sampled.token_id != best[1]
    assert found[2].sampled.token_id in {7, 8, 2999}
    assert found[5].sampled.rank == 1
    assert found[6].sampled.token_id in {60, 61, 63}
    assert found[7].sampled.token_id == 2999
