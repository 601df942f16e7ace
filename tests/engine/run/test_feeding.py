"""Steps of a ring that are fed: the next token's way begins before the engine has the last one."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from convoy.cluster.running import RunningCluster
from convoy.engine.completion import generate
from convoy.engine.requests.request import GenerationRequest
from convoy.engine.run.feeding import FedTokens, StepSamples
from convoy.errors import StepError
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.params import SamplingParams
from convoy.wire.messages.control import FED, Row, Step
from support.cluster import running_cluster

MINI = ModelSource.resolve("demo-mini")
KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=4),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=5, logprobs=2),
)
REQUESTS = [
    # A third of them may end early.
    GenerationRequest(tuple(range(3 + i, 9 + 9 * i)), KINDS[i % 3], 12 + 2 * i, ignore_eos=i % 3 > 0)
    for i in range(11)
]
# It needs the host between two tokens.
PENALTY = SamplingParams(temperature=0.7, presence_penalty=0.5, seed=6)
REQUESTS.append(GenerationRequest(tuple(range(40, 60)), PENALTY, 8, ignore_eos=True))
# What guesses needs the last token.
NO_GUESSES: dict[str, Any] = {"speculate": 0, "jump_forward": False}


def answers(cluster: RunningCluster) -> list[tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}

    def run(index: int) -> None:
        found[index] = generate(cluster.engine, REQUESTS[index]).token_ids

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(REQUESTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[index] for index in range(len(REQUESTS))]


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    with running_cluster(MINI, 1, **NO_GUESSES) as cluster:
        assert cluster.engine.scheduler.num_fed == 0
        return answers(cluster)


@pytest.mark.parametrize(
    "spans",
    [
        pytest.param(None, id="the head samples"),
        pytest.param({"alpha": "0:1", "beta": "2:output"}, id="the last member samples"),
    ],
)
def test_fed_texts_over_a_ring_are_those_of_one_member(
    spans: dict[str, str] | None, expected: list[tuple[int, ...]]
) -> None:
    with running_cluster(MINI, 2, spans=spans, **NO_GUESSES) as cluster:
        assert answers(cluster) == expected
        # All streams but one feed almost all of their tokens.
        assert cluster.engine.scheduler.num_fed > sum(map(len, expected)) // 2
        stats = cluster.engine.stats()
        assert (stats.running, stats.free_blocks) == (0, stats.num_blocks)
        assert stats.generated_tokens == sum(map(len, expected))


def test_a_fed_token_that_no_step_ahead_samples_is_refused() -> None:
    ahead = StepSamples.of(Step(4, [], [], [Row(1, 0, 3, 1)], b""))
    fed = np.array([FED], dtype="<u4").tobytes()
    assert FedTokens.of(Step(5, [], [], [Row(1, 3, 1, 1)], fed), [ahead]).sources == [ahead]
    with pytest.raises(StepError, match="step 5 has 1 fed tokens"):
        FedTokens.of(Step(5, [], [], [Row(2, 3, 1, 1)], fed), [ahead])
