"""Tokens that are drawn where the logits are: those of the host, with its errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from support.kernels import why_not

if why_not() is not None:
    pytest.skip(str(why_not()), allow_module_level=True)

from convoy.model.backends.cuda.kernels import draws
from convoy.model.backends.cuda.memory.staging import Staging
from convoy.model.backends.cuda.sampling import best_tokens, draw_tokens, score_tokens, start_sampling
from convoy.model.constraints.matcher import mask_bytes
from convoy.model.sampling.output_rows import SampleJob, sample_all, sample_row
from convoy.model.sampling.params import SamplingParams
from convoy.model.sampling.rows import params_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("width", [3000, 20000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_equal_logits_the_lowest_token_is_sampled(
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
        pytest.skip("samples are copied by streams of a device")
    logits = torch.randn(8, 3000, generator=torch.Generator().manual_seed(2))
    size = mask_bytes(3000)
    greedy, best = SamplingParams(temperature=0.0), [int(row.argmax()) for row in logits]
    jobs = [
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
    found = start_sampling(logits.to(device), jobs, copies, Staging(device)).outcomes()
    expected = sample_all(logits.numpy(), jobs)
    assert [one.sampled.token_id for one in found] == [one.sampled.token_id for one in expected]
    assert found[1].sampled.token_id != best[1]
    assert found[2].sampled.token_id in {7, 8, 2999}
    assert found[5].sampled.rank == 1
    assert found[6].sampled.token_id in {60, 61, 63}
    assert found[7].sampled.token_id == 2999


WIDTH = 5000
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "greedy with a bias": {"temperature": 0.0, "logit_bias": {7: 30.0, 8: 30.0}},
    "min_p": {"min_p": 0.1},
    "top_k": {"top_k": 40},
    "top_k of one": {"top_k": 1},
    "top_k of all": {"top_k": 10**6},
    "top_p": {"top_p": 0.9},
    "top_p of nothing": {"top_p": 0.0},
    "every cut": {"top_k": 60, "top_p": 0.95, "min_p": 0.001, "temperature": 1.5},
    "penalties": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {4: 2.5, WIDTH - 1: -100.0},
        "top_p": 0.8,
    },
}


class Plain:
    """Stand in for `Staging` where Triton's interpreter runs on the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def on_card(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device)


def jobs_of(setting: str) -> list[SampleJob]:
    """Return jobs without restrictions, with bans, with allowed tokens, and with a mask."""
    random = np.random.default_rng(5)
    said: list[int] = random.integers(0, WIDTH, 40).tolist()
    jobs = [
        SampleJob(
            SamplingParams(seed=seed, **SETTINGS[setting]), seed % 2, seed, [4, 7, *said], [9, 9, *said]
        )
        for seed in range(8)
    ]
    jobs[1] = replace(jobs[1], banned=[0, 1, 2, 7])
    jobs[3] = replace(jobs[3], allowed=[*range(0, WIDTH, 3)], banned=[3])
    jobs[5] = replace(jobs[5], mask=random.bytes(mask_bytes(WIDTH)))
    jobs[6] = replace(jobs[6], mask=random.bytes(mask_bytes(WIDTH)), allowed=range(100), banned=[5])
    return jobs


@pytest.mark.parametrize("shape", ["wide", "flat", "tied", "equal"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_draws_the_tokens_of_the_host(setting: str, shape: str, device: torch.device) -> None:
    jobs = jobs_of(setting)
    logits = torch.randn(len(jobs), WIDTH, generator=torch.Generator().manual_seed(3))
    logits = {"wide": logits * 4, "flat": logits / 9, "tied": logits.round(), "equal": logits * 0}[shape]
    logits = logits.bfloat16() if shape == "wide" else logits
    before = logits.clone()
    card = logits.to(device)
    tokens, statuses = draw_tokens(card, params_of(jobs, WIDTH), Plain(device)).tolist()  # type: ignore[arg-type]
    expected = [one.sampled.token_id for one in sample_all(before.float().numpy(), jobs)]
    assert [t for t, s in zip(tokens, statuses, strict=True) if not s] == [
        t for t, s in zip(expected, statuses, strict=True) if not s
    ]
    # Equal weights have limits at the ends of tokens, so the host may have to draw them.
    assert shape == "equal" or not any(statuses)
    assert not set(statuses) - {0, draws.AMBIGUOUS}
    assert torch.equal(card.cpu(), before)


@pytest.mark.parametrize("top", [0, 2, 20])
def test_log_probabilities_are_those_of_the_raw_logits(top: int, device: torch.device) -> None:
    logits = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(3)) * 3
    logits[1, [5, 4999]] = 20.0
    params = SamplingParams(temperature=0.0, logprobs=top, logit_bias={3: 100.0})
    tokens = torch.tensor([3, 3, 3], dtype=torch.int32, device=device)
    found = score_tokens(logits.to(device), tokens, [2, 1], top, Plain(device))  # type: ignore[arg-type]
    best = (found.shape[1] - 1) // 2
    for line, row in zip(found.tolist(), (2, 1), strict=True):
        expected = sample_row(logits[row].numpy(), SampleJob(params, 0, 0)).sampled
        assert line[0] == pytest.approx(expected.logprob, abs=1e-5)
        assert line[1 : 1 + top] == [token for token, _ in expected.top]
        assert line[1 + best :][:top] == pytest.approx([value for _, value in expected.top], abs=1e-5)


def test_rows_that_have_no_valid_token_fail_as_on_the_host(device: torch.device) -> None:
    logits = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(3))
    logits[0, 8], logits[1, 9], logits[2, 9] = float("nan"), float("inf"), float("-inf")
    logits[3, 4] = 3e38
    last = (1 << (mask_bytes(WIDTH) * 8 - 1)).to_bytes(mask_bytes(WIDTH), "little")
    jobs = [
        SampleJob(SamplingParams(top_p=0.5), 0, 0, banned=[8]),
        SampleJob(SamplingParams(), 0, 0),
        SampleJob(SamplingParams(temperature=0.0, logprobs=1), 0, 0),
        SampleJob(SamplingParams(repetition_penalty=0.01), 0, 0, generated_ids=[4]),
        # This bit belongs to no token.
        SampleJob(SamplingParams(), 0, 0, mask=last),
        SampleJob(SamplingParams(), 0, 0, allowed=[3], banned=[3]),
    ]
    statuses = draw_tokens(logits.to(device), params_of(jobs, WIDTH), Plain(device))[1].tolist()  # type: ignore[arg-type]
    assert statuses == [draws.NOT_FINITE] * 4 + [draws.NO_TOKEN] * 2


def test_errors_and_messages_are_those_of_the_host(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("samples are copied by streams of a device")
    logits = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(3))
    logits[0, 8] = float("nan")
    size, drawn = mask_bytes(WIDTH), SamplingParams(seed=5)
    jobs = [
        SampleJob(drawn, 0, 0),
        SampleJob(drawn, 0, 0, mask=b"\xff" * (size - 4)),
        SampleJob(drawn, 0, 0, mask=bytes(size)),
        SampleJob(drawn, 0, 0, allowed=[WIDTH]),
        SampleJob(drawn, 0, 0, banned=[-1]),
        SampleJob(SamplingParams(logit_bias={WIDTH: 1.0}), 0, 0),
        SampleJob(drawn, 0, 0, allowed=[3], banned=[3]),
        SampleJob(drawn, 0, 0, wants_logits=True),
        SampleJob(drawn, 0, 0),
    ]
    copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    found = start_sampling(logits.to(device), jobs, copies, Staging(device)).outcomes()
    expected = sample_all(logits.numpy(), jobs)
    assert [(type(one.error), str(one.error)) for one in found] == [
        (type(one.error), str(one.error)) for one in expected
    ]
    assert [one.error is None for one in found] == [False] * 7 + [True] * 2
    assert [one.sampled for one in found[7:]] == [one.sampled for one in expected[7:]]
    assert found[7].logits is not None
