"""A route of hosts and devices through real members and sealed links; the device here is a fake."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from convoy.cluster.options import HeadOptions, PeerOptions
from convoy.cluster.running import RunningCluster
from convoy.engine.completion import generate
from convoy.engine.requests.request import GenerationRequest
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.params import SamplingParams
from convoy.testing.network import MemoryNetwork
from support.cluster import MEMBER, NAMES, PeerThread, running_cluster
from support.fake_device import FakeDeviceStage, pretend_device
from support.members import make_local_members, membership_of
from support.waiting import wait_until

SOURCE = ModelSource.resolve("demo-mini")
GREEDY = SamplingParams(temperature=0.0)


def tokens_of(cluster: RunningCluster, count: int = 8) -> list[int]:
    request = GenerationRequest((5, 9, 30, 12), GREEDY, max_tokens=count, ignore_eos=True)
    return list(generate(cluster.engine, request).token_ids)


@contextmanager
def cluster_on(
    devices: tuple[str, ...], spans: dict[str, str] | None = None
) -> Iterator[tuple[RunningCluster, list[PeerThread]]]:
    network, members = MemoryNetwork(), make_local_members(NAMES[: len(devices)])
    options = [replace(MEMBER, device=device) for device in devices]
    peers = [
        PeerThread(me, PeerOptions(member), network)
        for me, member in zip(members[1:], options[1:], strict=True)
    ]
    head = HeadOptions(options[0], spans=spans, wait_s=60, num_blocks=64, recover_wait_s=5)
    try:
        cluster = RunningCluster.start(membership_of(members[0]), SOURCE, head, network=network)
        try:
            yield cluster, peers
        finally:
            cluster.close()
    finally:
        for peer in peers:
            peer.stop()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeDeviceStage]:
    return pretend_device(monkeypatch)


@pytest.fixture(scope="module")
def expected() -> list[int]:
    with running_cluster(SOURCE, 1) as alone:
        return tokens_of(alone)


@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu"), ("cpu", "cuda", "cpu")])
def test_hosts_and_devices_share_one_route(
    made: list[FakeDeviceStage], expected: list[int], devices: tuple[str, ...]
) -> None:
    with cluster_on(devices) as (cluster, _):
        found = tokens_of(cluster)
        status = cluster.status()
    assert found == expected
    assert status.kernel == "mixed"
    assert [stage.device for stage in status.stages] == [
        "cuda:0 (fake)" if device == "cuda" else "cpu" for device in devices
    ]
    assert {stage.kernel for stage in status.stages if stage.device == "cpu"} == {"exact-f32"}
    active = cluster.head.active_plan
    assert active is not None
    assert active.plan.activation_dtype == "bfloat16"
    # Only the thread that seals and sends waits for the device.
    holder = NAMES[devices.index("cuda")]
    assert made[0].waited_on == {f"leave {holder}"}


def test_the_last_member_may_sample_on_its_device(made: list[FakeDeviceStage], expected: list[int]) -> None:
    with cluster_on(("cpu", "cuda"), {"alpha": "0:2", "beta": "3:output"}) as (cluster, _):
        assert tokens_of(cluster) == expected
    assert len(made) == 1


def test_a_step_that_a_peers_device_cannot_finish_is_told_to_the_head(made: list[FakeDeviceStage]) -> None:
    with cluster_on(("cpu", "cuda")) as (cluster, _):
        assert tokens_of(cluster, 2)
        made[0].broken = True
        cluster.engine.wake()
        # another stage is made in place of the broken one, and the cluster goes on
        wait_until(lambda: len(made) > 1 or cluster.status().recoveries > 0)
