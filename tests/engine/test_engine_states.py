"""Qwen3.5 keeps recurrent state: nothing is shared, guessed or taken back, and the text is the same."""

from __future__ import annotations

import json
import logging
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from convoy.cluster.options import HeadOptions, PeerOptions
from convoy.cluster.running import RunningCluster
from convoy.engine.completion import generate
from convoy.engine.outputs import FinishOutput, Output, TokenOutput
from convoy.engine.requests.request import GenerationRequest
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.params import SamplingParams
from convoy.testing.network import MemoryNetwork
from support.cases import cases
from support.cluster import MEMBER, PeerThread, running_cluster
from support.members import make_local_members, membership_of
from support.odd_models import make_odd_llama
from support.tiny_models import build_model

GREEDY = SamplingParams(temperature=0.0)
PROMPTS = [tuple(range(5, 45)), tuple(range(90, 40, -1)), (7,)]
TWO = {"alpha": "0:1,output", "beta": "2:4"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    path: Path = tmp_path_factory.mktemp("models") / "states"
    make_odd_llama(path)  # for its tokenizer
    build_model("qwen3_5 nested").save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "eos_token_id": 104}))
    return ModelSource.resolve(str(path))


@pytest.fixture(scope="module")
def alone(source: ModelSource) -> Iterator[RunningCluster]:
    with running_cluster(source, 1, max_batch=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def said(alone: RunningCluster) -> list[tuple[int, ...]]:
    return [generate(alone.engine, asked(prompt)).token_ids for prompt in PROMPTS]


def asked(prompt: tuple[int, ...]) -> GenerationRequest:
    return GenerationRequest(prompt, GREEDY, 30)


def together(cluster: RunningCluster) -> list[tuple[int, ...]]:
    outputs: list[queue.SimpleQueue[Output]] = [queue.SimpleQueue() for _ in PROMPTS]
    handles = [
        cluster.engine.submit(asked(prompt), put.put) for prompt, put in zip(PROMPTS, outputs, strict=True)
    ]
    found = [tuple(tokens_of(out)) for out in outputs]
    for handle in handles:
        handle.abort()
    return found


def tokens_of(outputs: queue.SimpleQueue[Output]) -> Iterator[int]:
    while not isinstance(output := outputs.get(timeout=60), FinishOutput):
        assert isinstance(output, TokenOutput), output
        yield output.token_id


SCARCE: dict[str, Any] = {"num_blocks": 7}


@pytest.mark.parametrize(
    "changes", cases([{}, SCARCE, {"prefill_chunk": 16, "micro_batches": 2}], SCARCE.__eq__)
)
@pytest.mark.long
def test_two_members_say_what_one_says_whoever_is_beside_or_preempted(
    source: ModelSource, said: list[tuple[int, ...]], changes: dict[str, Any]
) -> None:
    assert len(set(said)) == len(PROMPTS)
    with running_cluster(source, 2, spans=TWO, **changes) as cluster:
        assert together(cluster) == said
        assert (cluster.engine.stats().preempted > 0) == ("num_blocks" in changes)
        assert together(cluster) == said, "a slot that another had"


def test_whoever_takes_over_a_lost_stage_runs_its_tokens_again(
    source: ModelSource, said: list[tuple[int, ...]]
) -> None:
    network, members = MemoryNetwork(), make_local_members(("alpha", "beta"))
    peer = PeerThread(members[1], PeerOptions(MEMBER, model_path=source.path), network)
    head = HeadOptions(MEMBER, spans=None, wait_s=10, num_blocks=64)
    cluster = RunningCluster.start(membership_of(members[0]), source, head, network=network)
    seen: list[str] = []

    def lose(text: str) -> None:
        seen.append(text)
        if len(seen) == 3:
            peer.stop()

    try:
        assert generate(cluster.engine, asked(PROMPTS[0]), lose).token_ids == said[0]
        assert cluster.head.active_plan is not None
        assert [stage.member for stage in cluster.head.active_plan.plan.stages] == ["alpha"]
    finally:
        cluster.close()
        peer.stop()


def test_nobody_guesses_although_asked_to_and_the_log_says_why(
    source: ModelSource, said: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with running_cluster(source, 1, speculate=8, guess_inexact=True) as cluster:
        assert cluster.status().guesses == 0
        assert "no token is guessed ahead: this model's layers keep a state" in caplog.text
        assert generate(cluster.engine, asked(PROMPTS[1])).token_ids == said[1]


def test_a_session_goes_back_by_running_its_tokens_again(alone: RunningCluster, tmp_path: Path) -> None:
    with alone.session() as fresh, alone.session() as session:
        fresh.sync(PROMPTS[0][:25])
        expected = fresh.logits()
        session.sync(PROMPTS[0])
        session.rewind(25)
        assert (session.logits() == expected).all()
        with session.fork() as fork:
            fork.eval(50)
            assert (session.logits() == expected).all()
        session.save(tmp_path / "saved", None)
    with alone.session() as later:
        assert later.load(tmp_path / "saved") == 0, "no K/V is carried"
        assert later.tokens == PROMPTS[0][:25]
        assert (later.logits() == expected).all()
