"""Left to itself a cluster takes ranks where they are predicted faster; where these then cannot begin, it
goes on with whole layers, and says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from convoy.cluster.peer.ranks import RankPeers
from convoy.errors import StepError
from convoy.plan.speed import Speed
from support.cluster import MEMBER
from support.rank_scene import break_joining, refuse, scene

PLAIN = replace(MEMBER, kernel="plain-f32")  # which promises no bits, so that ranks may be chosen
SLOW = Speed(read_bytes_per_s=1e6, flop_per_s=1e9)  # so slow that no link weighs anything beside it
AUTO = {"member": PLAIN, "parallel": "auto"}


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convoy.cluster.head.step_time.measure_speed", lambda *_: SLOW)


def test_ranks_that_are_predicted_faster_are_taken() -> None:
    with scene(2, **AUTO) as s:
        parallel = s.cluster.status().parallel
        assert parallel.mode == "tensor"
        assert parallel.reason.startswith("predicted faster: a step takes")
        assert len(s.start().result()) == 60


def hang_up(group: RankPeers) -> None:
    """Fail the link that sums would go over; the member is there all the same."""
    for link in group.links:
        link.revoke("the cable is broken")
    raise StepError("its link failed")


def say_nothing(released: threading.Event) -> Callable[[RankPeers], None]:
    def wait(_ranks: RankPeers) -> None:
        released.wait(3)

    return wait


def test_a_rank_that_refuses_leaves_a_pipeline_with_the_reason_in_status_and_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    break_joining(monkeypatch, refuse)
    with caplog.at_level("WARNING"), scene(2, **AUTO) as s:
        parallel = s.cluster.status().parallel
        assert parallel.mode == "pipeline"
        assert parallel.reason.startswith("the collective did not come up: ")
        assert "no sums today" in parallel.reason
        assert [stage.world_size for stage in s.cluster.status().stages] == [1, 1]
        assert len(s.start().result()) == 60
    assert "its members share the layers as a pipeline instead" in caplog.text


@pytest.mark.long
def test_a_rank_that_says_nothing_until_the_deadline_leaves_a_pipeline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released = threading.Event()
    break_joining(monkeypatch, say_nothing(released))
    with scene(2, member=replace(PLAIN, ranks_join_s=0.5), parallel="auto") as s:
        released.set()
        assert s.mode == "pipeline"
        assert "did not find together within 0.5 s" in s.cluster.status().parallel.reason
        assert len(s.start().result()) == 60


def test_a_link_that_fails_as_ranks_begin_leaves_whole_layers_and_no_request_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_joining(monkeypatch, hang_up)
    with scene(2, **AUTO) as s:
        assert s.mode in {"pipeline", "single"}, "the member may be dialled anew by then"
        assert len(s.start().result()) == 60
