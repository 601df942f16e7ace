"""A model of several hidden states a token, cut: its text is the whole's, after wrong guesses, preemptions
and a loss too.
"""

from __future__ import annotations

import json
import queue
from contextlib import ExitStack
from pathlib import Path

import pytest

from convoy.cluster.options import HeadOptions, PeerOptions
from convoy.cluster.running import RunningCluster
from convoy.engine.completion import generate
from convoy.engine.engine import Engine
from convoy.engine.outputs import ErrorOutput, FinishOutput, Output, TokenOutput
from convoy.engine.requests.request import GenerationRequest
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.params import SamplingParams
from convoy.testing.network import MemoryNetwork
from support.cluster import MEMBER, PeerThread, running_cluster
from support.members import make_local_members, membership_of
from support.odd_models import make_odd_llama
from support.tiny_models import build_model

# the second repeats itself, so that its tokens are guessed
REQUESTS = [
    GenerationRequest(tuple(range(5, 45)), SamplingParams(temperature=0.0), 11),
    GenerationRequest(tuple(range(50, 57)) * 5, SamplingParams(temperature=0.0), 11),
    GenerationRequest(tuple(range(20, 60)), SamplingParams(temperature=1.0, seed=3), 11),
]
SPANS = {"alpha": "0:0,output", "beta": "1:5"}  # a layer that takes token ids on each


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    path: Path = tmp_path_factory.mktemp("models") / "streams"
    make_odd_llama(path)  # for its tokenizer
    build_model("deepseek_v4").save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "eos_token_id": 104}))
    return ModelSource.resolve(str(path))


@pytest.fixture(scope="module")
def whole(source: ModelSource) -> list[tuple[int, ...]]:
    with running_cluster(source, 1) as cluster:
        return [generate(cluster.engine, request).token_ids for request in REQUESTS]


def together(engine: Engine) -> list[tuple[int, ...]]:
    """Return the answers of all requests that run beside each other."""
    waiting = [queue.SimpleQueue[Output]() for _ in REQUESTS]
    for request, outputs in zip(REQUESTS, waiting, strict=True):
        engine.submit(request, outputs.put)
    return [tokens_of(outputs) for outputs in waiting]


def tokens_of(outputs: queue.SimpleQueue[Output]) -> tuple[int, ...]:
    tokens: list[int] = []
    while not isinstance(output := outputs.get(timeout=30), FinishOutput):
        if isinstance(output, ErrorOutput):
            raise output.error
        if isinstance(output, TokenOutput):
            tokens.append(output.token_id)
    return tuple(tokens)


@pytest.mark.parametrize(
    "spans", [SPANS, pytest.param({"alpha": "1:output", "beta": "0:0"}, marks=pytest.mark.long)]
)
def test_a_split_model_says_what_the_whole_says_and_guesses_change_nothing(
    source: ModelSource, whole: list[tuple[int, ...]], spans: dict[str, str]
) -> None:
    with running_cluster(source, 2, spans=spans, speculate=6) as cluster:
        assert together(cluster.engine) == whole
        assert cluster.status().drafted_tokens > 0


@pytest.mark.long
def test_who_finds_no_room_is_run_again_to_the_same_text(
    source: ModelSource, whole: list[tuple[int, ...]]
) -> None:
    with running_cluster(source, 2, spans=SPANS, num_blocks=5, prefill_chunk=16) as cluster:
        assert together(cluster.engine) == whole
        assert cluster.engine.stats().preempted > 0


def test_who_takes_over_a_lost_members_layers_goes_on_with_the_same_text(
    source: ModelSource, whole: list[tuple[int, ...]]
) -> None:
    network, members = MemoryNetwork(), make_local_members(("alpha", "beta", "gamma"))
    with ExitStack() as stack:
        peers = [PeerThread(me, PeerOptions(MEMBER, model_path=source.path), network) for me in members[1:]]
        for peer in peers:
            stack.callback(peer.stop)
        options = HeadOptions(MEMBER, wait_s=5, num_blocks=256)
        cluster = RunningCluster.start(membership_of(members[0]), source, options, network=network)
        stack.callback(cluster.close)
        outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        cluster.engine.submit(REQUESTS[2], outputs.put)
        first = [outputs.get(timeout=30) for _ in range(7)]
        peers[1].stop()
        begun = tuple(output.token_id for output in first if isinstance(output, TokenOutput))
        assert begun + tokens_of(outputs) == whole[2]
        assert cluster.engine.stats().recoveries == 1
