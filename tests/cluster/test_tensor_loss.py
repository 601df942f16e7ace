"""A rank is lost, or never comes to its sums: requests wait, and whole layers take over."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from convoy.cluster.peer.ranks import RankPeers
from convoy.engine.ranks.sums.sealed import SealedCollective
from convoy.errors import CollectiveError, PeerRefused
from support.cases import cases
from support.cluster import MEMBER
from support.rank_scene import break_joining, refuse, scene
from support.waiting import wait_until

# `auto` by itself takes no ranks under exact-f32
GROUPED = {"alpha+beta": "0:3,output"}


@pytest.fixture(scope="module")
def expected() -> list[int]:
    with scene(1) as alone:
        return alone.start().result()


@pytest.mark.parametrize("lost", ["beta"])
def test_a_rank_that_is_lost_while_a_text_runs_costs_a_pause_and_no_request(
    lost: str, expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with scene(2, spans=GROUPED) as s:
        assert s.mode == "tensor"
        answer = s.start()
        assert answer.some.wait(30)
        with caplog.at_level("WARNING"):
            s.members[lost].stop()
            assert answer.result() == expected
        assert "not bit-exact with the previous ones" in caplog.text
        assert s.mode == "single"
        assert s.cluster.engine.stats().recoveries == 1


# beside the head, and each rank of a stage without it
@pytest.mark.parametrize("lost", cases(["beta", "gamma", "delta"], "gamma".__eq__))
@pytest.mark.long
def test_any_rank_of_two_stages_of_two_may_be_lost(lost: str, expected: list[int]) -> None:
    with scene(4, parallel="tensor", ranks=2) as s:
        answer = s.start()
        assert answer.some.wait(30)
        s.members[lost].stop()
        assert answer.result() == expected
        assert lost not in {stage.member for stage in s.cluster.status().stages}


def test_a_rank_that_is_lost_while_nothing_runs_is_missed_before_anybody_asks(expected: list[int]) -> None:
    with scene(2, spans=GROUPED) as s:
        s.members["beta"].stop()
        wait_until(lambda: s.cluster.engine.stats().recoveries == 1)
        assert s.start().result() == expected


def test_a_rank_that_computes_no_more_is_found_by_the_sum_that_it_owes(
    expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, num = SealedCollective.all_reduce, 0

    def all_reduce(self: SealedCollective, x: torch.Tensor) -> torch.Tensor:
        nonlocal num
        num += self.rank == 1
        if self.rank == 1 and num == 100:
            raise CollectiveError("it computes no more")
        return real(self, x)

    with scene(2, spans=GROUPED) as s:
        monkeypatch.setattr(SealedCollective, "all_reduce", all_reduce)
        assert s.start().result() == expected
        assert s.cluster.engine.stats().recoveries == 1
        assert s.mode == "tensor", "every member is there, and a wire may fail once"


def test_a_member_that_comes_back_makes_ranks_again(expected: list[int]) -> None:
    with scene(2, spans=GROUPED) as s:
        s.members["beta"].stop()
        wait_until(lambda: s.mode == "single")
        s.join("beta")
        wait_until(lambda: s.mode == "tensor")
        assert s.start().result() == expected


def test_where_ranks_do_not_come_together_whole_layers_take_over_and_it_is_said(
    expected: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    break_joining(monkeypatch, refuse)
    with caplog.at_level("WARNING"), scene(2, spans=GROUPED) as s:
        parallel = s.cluster.status().parallel
        assert parallel.mode == "pipeline"
        assert "the collective did not come up" in parallel.reason
        assert "no sums today" in parallel.reason
        assert s.start().result() == expected
    assert "share the layers as a pipeline instead" in caplog.text


@pytest.mark.long
def test_a_rank_that_says_nothing_is_waited_for_no_longer_than_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    member = replace(MEMBER, ranks_join_s=0.5)
    released = threading.Event()
    break_joining(monkeypatch, lambda _ranks: released.wait(3))
    # The error names the deadline that ended the wait.
    what = r"the ranks of a stage did not come together: .* within 0\.5 s"
    with pytest.raises(PeerRefused, match=what) as caught, scene(2, member=member, parallel="tensor"):
        pass
    released.set()
    assert "--parallel" in (caught.value.hint or "")


def test_ranks_that_were_asked_for_and_do_not_come_together_are_an_error_with_a_hint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_joining(monkeypatch, refuse)
    with pytest.raises(PeerRefused, match="no sums today") as caught, scene(2, parallel="tensor"):
        pass
    assert "--parallel" in (caught.value.hint or "")


def test_a_rank_that_goes_while_they_come_together_leaves_the_others_whole_layers(
    expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def go(group: RankPeers) -> None:
        for link in group.links:
            link.revoke("pulled out")

    break_joining(monkeypatch, go)
    with scene(2, spans=GROUPED) as s:
        assert s.mode == "single"
        assert s.start().result() == expected


@pytest.mark.long
def test_requests_wait_while_ranks_fail_to_come_together_after_a_loss(
    expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with scene(4, spans={"alpha+beta": "0:1,output", "gamma+delta": "2:3"}) as s:
        answer = s.start()
        assert answer.some.wait(30)
        break_joining(monkeypatch, refuse)
        s.members["delta"].stop()
        assert answer.result() == expected
