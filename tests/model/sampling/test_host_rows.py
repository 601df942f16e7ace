"""Rows that are drawn together: each token is that of the definition, row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from convoy.errors import StepError
from convoy.model.sampling.host_rows import draw_tokens, rows_at_once
from convoy.model.sampling.output_rows import SampleJob, sample_all, sample_row
from convoy.model.sampling.params import SamplingParams
from convoy.model.sampling.sample import best_ids

WIDTH = 5000
SHAPES = ["wide", "flat", "tied", "equal", "peaked"]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3, "min_p": 0.02},
    {"temperature": 2.0, "top_p": 0.95},
    {"top_p": 0.5, "min_p": 0.001, "top_k": -1},
    {"top_p": 0.0},
    {"top_p": 0.99999, "logprobs": 3},
    {"top_k": 40, "top_p": 0.9},
    {"temperature": 0.0},
    {"temperature": 1e-300, "top_p": 0.9},
    {"top_p": 0.9, "repetition_penalty": 1.4, "frequency_penalty": 0.3, "logit_bias": {9: 4.0}},
]


def logits_of(shape: str, rows: int) -> npt.NDArray[np.float32]:
    found = np.random.default_rng(SHAPES.index(shape)).standard_normal((rows, WIDTH))
    if shape == "peaked":
        found[:, 7] += 14
    scales = {"wide": found * 4, "flat": found / 20, "tied": np.round(found), "equal": found * 0}
    return scales.get(shape, found).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_drawn_together_have_the_definitions_tokens(shape: str) -> None:
    jobs = [
        SampleJob(
            SamplingParams(seed=seed, **settings),
            0,
            seed,
            [1, 2, 3],
            [3, 4, 4],
            banned=[5] * (seed % 2),
            allowed=range(0, WIDTH, 3) if seed % 5 == 4 else (),
        )
        for seed in range(4)
        for settings in SETTINGS
    ]
    logits = logits_of(shape, len(jobs))
    before = logits.copy()
    assert sample_all(logits, jobs) == tuple(
        sample_row(row, job) for row, job in zip(before, jobs, strict=True)
    )
    assert (logits == before).all()


def test_only_numbers_near_a_limit_are_left_to_the_definition() -> None:
    logits = logits_of("wide", 2 * rows_at_once(WIDTH))
    params = [SamplingParams(top_p=0.9 if row % 2 else 1.0) for row in range(len(logits))]
    random = np.random.default_rng(3).random(len(logits))
    assert (draw_tokens(logits, params, random) >= 0).all()
    # Of equal weights, a half is the end of a token.
    equal = np.zeros((1, WIDTH), dtype=np.float32)
    assert draw_tokens(equal, [SamplingParams()], np.array([0.5])).tolist() == [-1]
    assert draw_tokens(equal, [SamplingParams(top_p=0.5)], np.array([0.123])).tolist() == [-1]
    assert draw_tokens(equal, [SamplingParams()], np.array([0.50001])).tolist() == [2500]


def test_an_error_belongs_to_its_row_alone() -> None:
    logits = logits_of("wide", 4)
    logits[1, 3] = np.nan
    jobs = [
        SampleJob(SamplingParams(seed=1), 0, 5),
        SampleJob(SamplingParams(seed=1), 0, 5),
        SampleJob(SamplingParams(seed=1), 0, 5, allowed=[8], banned=[8]),
        SampleJob(SamplingParams(seed=1), 0, 5, wants_logits=True),
    ]
    found = sample_all(logits, jobs)
    assert [type(one.error) for one in found] == [type(None), StepError, StepError, type(None)]
    kept = found[3].logits
    assert kept is not None
    assert (kept == logits[3]).all()
    assert kept.base is not logits


@pytest.mark.parametrize("count", [1, 2, 20, 77, 78, 79, 4999, 5000])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_best_tokens_are_those_of_a_whole_sort(shape: str, count: int) -> None:
    (values,) = logits_of(shape, 1)
    order = np.argsort(-values, kind="stable")[:count]
    assert best_ids(values, count).tolist() == sorted(order.tolist())
