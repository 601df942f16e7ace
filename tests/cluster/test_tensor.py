"""A real head and real peers in one process, that hold every layer together: the same texts as one alone."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from convoy.cluster.running import RunningCluster
from convoy.engine.outputs import ErrorOutput, FinishOutput, Output, TokenOutput
from convoy.engine.requests.request import GenerationRequest
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.params import SamplingParams
from support.cases import cases
from support.cluster import running_cluster
from support.waiting import wait_until

SOURCE = ModelSource.resolve("demo-mini")
GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=5, frequency_penalty=0.2)
PROMPTS = [
    "What is 8+9? Answer with just the number.",
    "Tell me a story about a dog.",
    "The cat sat on the mat. The cat sat on the mat. The cat",
    "one two three four five one two three",
]
TOLERANCE = 1e-4  # of logits: partial sums are added in another order than one process adds them
TOKENS = tuple(range(5, 75))
# The first of many tokens are those of a shorter answer, so a cluster of its own needs no long one.
NUM_TOKENS, FEW_TOKENS = 24, 8


def texts(cluster: RunningCluster, num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    """Return greedy and seeded texts, eight at once, so that rows of many share steps."""
    heard: list[queue.SimpleQueue[Output]] = []
    for prompt in PROMPTS:
        ids = tuple(cluster.tokenizer.encode_chat([{"role": "user", "content": prompt}]))
        for params in (GREEDY, SEEDED):
            heard.append(queue.SimpleQueue())
            cluster.engine.submit(GenerationRequest(ids, params, num_tokens, ignore_eos=True), heard[-1].put)
    found = []
    for outputs in heard:
        tokens = []
        while not isinstance(output := outputs.get(timeout=60), FinishOutput | ErrorOutput):
            if isinstance(output, TokenOutput):
                tokens.append(output.token_id)
        assert isinstance(output, FinishOutput), output
        found.append(tokens)
    return found


@pytest.fixture(scope="module")
def alone() -> Iterator[RunningCluster]:
    with running_cluster(SOURCE, 1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected(alone: RunningCluster) -> list[list[int]]:
    return texts(alone)


def beginning(told: list[list[int]]) -> list[list[int]]:
    return [tokens[:FEW_TOKENS] for tokens in told]


@pytest.fixture(scope="module")
def two() -> Iterator[RunningCluster]:
    """Run two ranks of every layer."""
    with running_cluster(SOURCE, 2, parallel="tensor", prefill_chunk=32) as cluster:
        yield cluster


def ranks(cluster: RunningCluster) -> list[list[str]]:
    assert cluster.head.active_plan is not None
    return [stage.ranks for stage in cluster.head.active_plan.plan.stages]


def test_eight_streams_over_two_ranks_say_what_one_member_says(
    two: RunningCluster, expected: list[list[int]]
) -> None:
    assert ranks(two) == [["alpha", "beta"]]
    first = texts(two)
    assert first == expected
    again = two.engine.stats().cached_tokens
    assert texts(two) == expected, "also from the prefixes that stay"
    assert two.engine.stats().cached_tokens > again


def test_status_shows_each_rank_and_why(two: RunningCluster) -> None:
    status = two.status()
    assert [(s.member, s.rank, s.world_size) for s in status.stages] == [("alpha", 0, 2), ("beta", 1, 2)]
    assert (status.parallel.mode, status.parallel.reason) == ("tensor", "asked for: tensor")
    assert status.route == "complete: alpha+beta 0:output"
    assert all(stage.can_read_prompts == "tokens" for stage in status.stages), (
        "each looks tokens up in its vocabulary"
    )
    weights = [stage.weight_bytes for stage in status.stages]
    assert max(weights) < 0.6 * (sum(weights))
    assert all(0.5 <= stage.weight_share <= 0.6 for stage in status.stages)
    assert status.ready


@pytest.mark.parametrize("num_members", cases([3, 4], (4).__eq__))
def test_several_stages_of_which_some_have_two_ranks(num_members: int, expected: list[list[int]]) -> None:
    with running_cluster(SOURCE, num_members, parallel="tensor", ranks=2) as cluster:
        wanted = {3: [["alpha", "beta"], []], 4: [["alpha", "beta"], ["gamma", "delta"]]}
        assert ranks(cluster) == wanted[num_members]
        assert texts(cluster, FEW_TOKENS) == beginning(expected)


@pytest.mark.parametrize(
    "spans",
    [
        pytest.param({"alpha": "0:1,output", "beta+gamma": "2:3"}, marks=pytest.mark.long),
        {"beta+gamma": "0:1", "alpha": "2:output"},
        {"alpha": "0:1", "beta+gamma": "2:output"},
    ],
    ids=["default", "reverse", "forward"],
)
def test_peers_are_ranks_of_a_stage_without_the_head(
    spans: dict[str, str], expected: list[list[int]]
) -> None:
    with running_cluster(SOURCE, 3, spans=spans) as cluster:
        assert ["beta", "gamma"] in ranks(cluster)
        assert texts(cluster, FEW_TOKENS) == beginning(expected)


@pytest.mark.long
def test_four_ranks_stand_in_a_ring() -> None:
    source = ModelSource.resolve("demo")  # four can share its heads
    with running_cluster(source, 1) as alone, running_cluster(source, 4, parallel="tensor") as four:
        assert ranks(four) == [["alpha", "beta", "gamma", "delta"]]
        assert texts(four, 6) == texts(alone, 6)


def test_guesses_change_no_text(expected: list[list[int]]) -> None:
    with running_cluster(SOURCE, 2, parallel="tensor", speculate=4) as cluster:
        assert texts(cluster) == expected
        assert cluster.engine.stats().accepted_tokens > 0


def test_a_stream_that_is_cancelled_frees_its_blocks_on_every_rank(
    two: RunningCluster, expected: list[list[int]]
) -> None:
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    handle = two.engine.submit(GenerationRequest(TOKENS, GREEDY, 150, ignore_eos=True), outputs.put)
    assert isinstance(outputs.get(timeout=30), TokenOutput)
    handle.abort()
    wait_until(lambda: two.engine.stats().running == 0)
    assert two.engine.stats().free_blocks == two.engine.stats().num_blocks
    assert texts(two) == expected


def test_a_session_over_ranks_goes_on_where_one_member_saved_it_and_the_other_way_round(
    alone: RunningCluster, two: RunningCluster, tmp_path: Path
) -> None:
    for at, (one, other) in enumerate([(alone, two), (two, alone)]):
        file = tmp_path / f"{at}.session"
        with one.session() as before:
            before.sync(TOKENS)
            before.save(file, None)
            wanted = before.logits()
        with other.session() as after:
            assert after.load(file) == len(TOKENS) // 16 * 16
            taken = other.engine.stats().cached_tokens
            np.testing.assert_allclose(after.logits(), wanted, atol=TOLERANCE)
            assert other.engine.stats().cached_tokens - taken == 64, "its K/V was taken, not computed"
            after.rewind(37)
            after.sync(TOKENS[:60])
            with alone.session() as whole:
                whole.sync(TOKENS[:60])
                np.testing.assert_allclose(after.logits(), whole.logits(), atol=TOLERANCE)
