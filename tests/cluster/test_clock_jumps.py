"""A wall clock that jumps, as on a laptop that wakes, loses no member: deadlines and links do not read it."""

from __future__ import annotations

import time

import pytest

from convoy.engine.completion import generate
from convoy.engine.requests.request import GenerationRequest
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.params import SamplingParams
from support.cluster import running_cluster

REQUEST = GenerationRequest((5, 9, 30, 12), SamplingParams(temperature=0.0), max_tokens=12, ignore_eos=True)


def test_texts_are_the_same_and_no_member_is_lost_when_the_clock_jumps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wall_s = time.time
    with running_cluster(ModelSource.resolve("demo-mini"), 2) as cluster:
        expected = generate(cluster.engine, REQUEST).token_ids
        for hours in (9, -9):
            monkeypatch.setattr(time, "time", lambda hours=hours: wall_s() + 3600 * hours)
            assert cluster.status().ready
            assert generate(cluster.engine, REQUEST).token_ids == expected
        assert cluster.engine.stats().recoveries == 0
