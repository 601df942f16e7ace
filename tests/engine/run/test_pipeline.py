"""A short prompt over two real stages: both have a part of it at once, and the answer is one process's."""

from __future__ import annotations

import pytest

from convoy.cluster.running import RunningCluster
from convoy.engine.completion import generate
from convoy.engine.requests.request import GenerationRequest
from convoy.engine.run.pipeline import PipelineExecutor
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.params import SamplingParams
from convoy.wire.messages.control import Step
from support.cluster import running_cluster

PROMPT = tuple(range(5, 205))
REQUEST = GenerationRequest(PROMPT, SamplingParams(temperature=0.8, seed=4), max_tokens=8, ignore_eos=True)


def answer(cluster: RunningCluster) -> tuple[tuple[int, ...], bytes]:
    with cluster.session() as session:
        session.sync([*PROMPT[::-1]])
        logits = session.logits().tobytes()
    return generate(cluster.engine, REQUEST).token_ids, logits


def test_a_short_prompt_is_on_both_stages_at_once_and_every_bit_is_as_in_one_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mini = ModelSource.resolve("demo-mini")
    with running_cluster(mini, 1) as cluster:
        expected = answer(cluster)
    chunks: list[tuple[int, int]] = []  # tokens of a chunk, and chunks in flight with it
    real = PipelineExecutor.submit

    def submit(self: PipelineExecutor, step: Step, samples: object) -> None:
        real(self, step, samples)  # type: ignore[arg-type]
        num_tokens = sum(row.num_tokens for row in step.rows)
        if num_tokens > 1:
            chunks.append((num_tokens, sum(bool(one.step.rows) for one in self._in_flight)))

    monkeypatch.setattr(PipelineExecutor, "submit", submit)
    with running_cluster(mini, 2) as cluster:
        assert answer(cluster) == expected
    assert chunks == [(96, 1), (104, 2)] * 2
