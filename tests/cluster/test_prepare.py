"""A member that comes gets its weights while the others go on: the pause is for loading alone."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.recovery.test_recovery import stages
from convoy.cluster.options import HeadOptions, PeerOptions, RebalanceOptions
from convoy.cluster.running import RunningCluster
from convoy.cluster.weights.peer_weights import PeerWeights
from convoy.engine.completion import generate
from convoy.engine.requests.request import GenerationRequest
from convoy.errors import StepError
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.params import SamplingParams
from convoy.testing.network import MemoryNetwork
from convoy.wire.messages.fetch import Fetch, Piece
from support.cluster import MEMBER, PeerThread
from support.members import make_local_members, membership_of
from support.odd_models import make_odd_llama
from support.waiting import wait_until

REQUEST = GenerationRequest((3, 9, 20, 7), SamplingParams(temperature=0.0), max_tokens=12)


class Cluster:
    """Run alpha and beta; start gamma when a test asks."""

    def __init__(self, folder: Path, rebalance: RebalanceOptions | None = None) -> None:
        self.model = make_odd_llama(folder / "odd")
        self.network, self.members = MemoryNetwork(), make_local_members(("alpha", "beta", "gamma"))
        self.peers = [self.join(1, PeerOptions(MEMBER, model_path=self.model))]
        rebalance = rebalance or RebalanceOptions()
        options = HeadOptions(MEMBER, wait_s=3, num_blocks=64, rebalance=rebalance)
        source = ModelSource.resolve(str(self.model))
        self.running = RunningCluster.start(
            membership_of(self.members[0]), source, options, network=self.network
        )

    def join(self, index: int, options: PeerOptions) -> PeerThread:
        return PeerThread(self.members[index], options, self.network)

    def answer(self) -> tuple[int, ...]:
        return generate(self.running.engine, REQUEST).token_ids

    def close(self) -> None:
        self.running.close()
        for peer in self.peers:
            peer.stop()


def test_a_newcomers_weights_come_while_the_others_go_on(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    asked, go_on = threading.Event(), threading.Event()
    weights: Any = cluster.running.head.weight_server
    answer = weights.answer_fetch

    def held(fetch: Fetch, *more: object) -> Piece:
        asked.set()
        assert go_on.wait(60)
        piece: Piece = answer(fetch, *more)
        return piece

    weights.answer_fetch = held
    expected = cluster.answer()
    plan_id = cluster.running.status().generation
    cache = tmp_path / "cache"
    cluster.peers.append(cluster.join(2, PeerOptions(replace(MEMBER, cache=cache))))
    assert asked.wait(60)
    assert cluster.answer() == expected
    assert cluster.running.health()[0]
    assert cluster.running.status().generation == plan_id, "the same plan, all the while"
    go_on.set()
    wait_until(lambda: stages(cluster.running) == ["alpha", "beta", "gamma"])
    wait_until(lambda: cluster.running.health()[0])
    assert cluster.answer() == expected
    assert list(cache.glob("models/*/tensors/*"))
    cluster.close()


@pytest.mark.long
def test_a_newcomer_that_cannot_have_the_weights_disturbs_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster(tmp_path)
    expected = cluster.answer()
    plan_id = cluster.running.status().generation
    with caplog.at_level(logging.WARNING):
        cluster.peers.append(cluster.join(2, PeerOptions(MEMBER)))
        said = "not shared out anew for gamma: gamma lacks the weights: gamma has no files for odd"
        wait_until(lambda: said in caplog.text)
    assert cluster.answer() == expected
    assert cluster.running.status().generation == plan_id
    cluster.close()


@pytest.mark.long
def test_a_newcomer_is_used_after_a_disk_that_was_full_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path, RebalanceOptions(busy_s=0.2, again_s=0.2))
    failures = iter(["the disk is full"])
    make_ready = PeerWeights.make_ready

    def full_once(weights: PeerWeights, *more: Any) -> Any:
        if why := next(failures, ""):
            raise StepError(why)
        return make_ready(weights, *more)

    monkeypatch.setattr(PeerWeights, "make_ready", full_once)
    cluster.peers.append(cluster.join(2, PeerOptions(replace(MEMBER, cache=tmp_path / "cache"))))
    wait_until(lambda: stages(cluster.running) == ["alpha", "beta", "gamma"])
    assert next(failures, "") == "", "the first preparation failed"
    cluster.close()
