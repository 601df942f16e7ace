"""A step's jobs as arrays: what a device needs to draw all rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from convoy.model.constraints.matcher import mask_bytes
from convoy.model.sampling.output_rows import GREEDY, SampleJob
from convoy.model.sampling.params import SamplingParams
from convoy.model.sampling.rows import fits, params_of
from convoy.model.sampling.sample import shape, uniform

WIDTH = 105


def test_each_row_has_its_parameters_and_a_greedy_one_has_no_limit() -> None:
    params = SamplingParams(temperature=0.5, top_p=0.9, min_p=0.1, top_k=-1, seed=3)
    found = params_of([GREEDY, SampleJob(params, 2, 8, mask=bytes(15) + b"\1"), GREEDY], WIDTH)
    assert found.table.tolist() == [
        [0.0, 1.0, 0.0, 0.5, 0.0, -1.0],
        [0.5, 0.9, 0.1, uniform(3, 2, 8), 0.0, 0.0],
        [0.0, 1.0, 0.0, 0.5, 0.0, -1.0],
    ]
    assert (found.cuts_count, found.cuts_mass, found.edits) == (False, True, None)
    assert found.masks.tobytes() == bytes(15) + b"\1"


def test_edits_and_masks_give_the_logits_of_the_definition() -> None:
    logits = np.random.default_rng(1).standard_normal((3, WIDTH)).astype(np.float32) * 5
    params = SamplingParams(
        repetition_penalty=1.7, presence_penalty=0.3, frequency_penalty=-0.4, logit_bias={5: 2.0, 9: -7.5}
    )
    jobs = [
        SampleJob(params, 0, 0, [1, 2, 2, 9], [2, 3, 3, 104], banned=[3, 50, 3]),
        SampleJob(SamplingParams(), 0, 0, banned=[4], allowed=[4, 5, 104], mask=bytes(13) + b"\xff\0\0"),
        SampleJob(SamplingParams(frequency_penalty=1.1), 0, 0, [8], [7, 7, 7]),
    ]
    found = params_of(jobs, WIDTH)
    assert found.edits is not None
    (rows, tokens, banned), (factors, less, more) = found.edits.places, found.edits.values
    assert len({*zip(rows.tolist(), tokens.tolist(), strict=True)}) == len(rows)
    edited = logits.copy()
    values = edited[rows, tokens]
    values = np.where(values > 0, values / factors, values * factors) - less + more
    edited[rows, tokens] = np.where(banned, -np.inf, values)
    for row, job in enumerate(jobs):
        place = int(found.table[row, 5])
        if place >= 0:
            bits = np.unpackbits(found.masks[place], bitorder="little")[:WIDTH]
            edited[row, bits == 0] = -np.inf
        expected = shape(
            logits[row],
            job.params,
            prompt_ids=job.prompt_ids,
            generated_ids=job.generated_ids,
            allowed=job.allowed,
            banned=job.banned,
            mask=job.mask,
        )
        assert (edited[row] == expected).all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"mask": b"\xff" * (mask_bytes(WIDTH) - 4)},
        {"mask": bytes(mask_bytes(WIDTH))},
        {"allowed": [WIDTH]},
        {"banned": [-1]},
        {"params": SamplingParams(logit_bias={WIDTH: 1.0})},
    ],
)
def test_a_row_with_a_wrong_field_does_not_fit(wrong: dict[str, Any]) -> None:
    right: dict[str, Any] = {"params": SamplingParams(logit_bias={0: 1.0}), "choice": 0, "position": 0}
    assert fits(SampleJob(**right, allowed=[0, 104], mask=b"\xff" * mask_bytes(WIDTH)), WIDTH)
    assert not fits(SampleJob(**{**right, **wrong}), WIDTH)
