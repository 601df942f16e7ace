"""Ranks of a stage over real processes, sockets and TLS: eight streams at once say what one process says."""

from __future__ import annotations

import queue

import pytest

from convoy.cluster.running import RunningCluster
from convoy.engine.outputs import ErrorOutput, FinishOutput, Output, TokenOutput
from convoy.engine.requests.request import GenerationRequest
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.params import SamplingParams
from convoy.sdk.local_cluster import LocalCluster, LocalOptions
from convoy.sdk.options import head_options, load_head

PARAMS = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_p=0.95, seed=5)]
PROMPTS = [
    "What is 45+72? Answer with just the number.",
    "Tell me a story about a dog.",
    "The cat sat on the mat. The cat sat on the mat. The cat",
    "one two three four five one two three",
]
NUM_TOKENS = 32


def streams(cluster: RunningCluster) -> list[list[int]]:
    heard: list[queue.SimpleQueue[Output]] = []
    for prompt in PROMPTS:
        ids = tuple(cluster.tokenizer.encode_chat([{"role": "user", "content": prompt}]))
        for params in PARAMS:
            heard.append(queue.SimpleQueue())
            cluster.engine.submit(GenerationRequest(ids, params, NUM_TOKENS, ignore_eos=True), heard[-1].put)
    found = []
    for outputs in heard:
        tokens = []
        while not isinstance(output := outputs.get(timeout=60), FinishOutput | ErrorOutput):
            if isinstance(output, TokenOutput):
                tokens.append(output.token_id)
        assert isinstance(output, FinishOutput), output
        found.append(tokens)
    return found


def run(num_members: int, sharing: dict[str, object]) -> tuple[list[list[int]], list[tuple[str, int]]]:
    """Return their texts, the same twice over, and the member of each rank."""
    options = LocalOptions(num_members, kernel="exact-f32", num_threads=1, sharing=sharing)
    with LocalCluster(options) as local:
        local.start_peers("demo")
        config = local.config(local.head)
        source = ModelSource.resolve("demo")
        cluster = RunningCluster.start(
            load_head(config), source, head_options(config), watch=local.check_alive
        )
        try:
            first = streams(cluster)
            assert streams(cluster) == first, "the same bits from run to run"
            holders = [(stage.member, stage.rank) for stage in cluster.status().stages]
            assert num_members == 1 or cluster.head.sealed_bytes() > 100_000
        finally:
            cluster.close()
    return first, holders


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return run(1, {})[0]


@pytest.mark.slow
@pytest.mark.long
def test_two_members_on_every_layer(expected: list[list[int]]) -> None:
    found, holders = run(2, {"parallel": "tensor"})
    assert holders == [("alpha", 0), ("beta", 1)]
    assert found == expected


@pytest.mark.slow
@pytest.mark.long
def test_four_members_as_two_stages_of_two_ranks(expected: list[list[int]]) -> None:
    found, holders = run(4, {"parallel": "tensor", "ranks": 2})
    assert holders == [("alpha", 0), ("beta", 1), ("gamma", 0), ("delta", 1)]
    assert found == expected


@pytest.mark.slow
@pytest.mark.long
def test_four_members_on_every_layer(expected: list[list[int]]) -> None:
    found, holders = run(4, {"parallel": "tensor", "ranks": 4})
    assert holders == [("alpha", 0), ("beta", 1), ("gamma", 2), ("delta", 3)]
    assert found == expected
