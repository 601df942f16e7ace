"""A peer is lost or slow that the head needs: a standby takes its place, or the streams wait for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from convoy.model.checkpoints.source import ModelSource
from convoy.model.kernels.registry import own_form
from convoy.plan.memory.memory import stage_bytes
from convoy.plan.span import Span
from survival.losing import PARAMS, WAIT_S, Survival, survival, told, wait_for

pytestmark = pytest.mark.slow


def bytes_for(first_layers: int) -> int:
    """Return the bytes for so many layers, the ends and some K/V, but not for one layer more."""
    spec = ModelSource.resolve("demo").spec
    return stage_bytes(spec, Span(0, first_layers, True), own_form("exact-f32")) + 1_000_000


@pytest.fixture(scope="module")
def started_two() -> Iterator[Survival]:
    with survival(2, wires=("beta",), head_bytes=bytes_for(7)) as s:
        yield s


@pytest.fixture
def two(started_two: Survival) -> Survival:
    """Return two members that need each other."""
    return started_two.make_whole()


def test_a_slow_member_that_cannot_be_spared_is_waited_for(two: Survival) -> None:
    s = two

    def slow_down() -> None:
        s.wires["beta"].delay_s = 1.5
        threading.Timer(8.0, lambda: setattr(s.wires["beta"], "delay_s", 0.0)).start()

    told("slow and needed", s.check(slow_down))
    assert s.members() == ["alpha", "beta"]
    assert s.recoveries() == 0, "waiting is not losing"


def test_a_member_that_nobody_can_stand_in_for_restarts_and_comes_back(two: Survival) -> None:
    s = two
    health: list[str] = []

    def restart() -> None:
        s.kill("beta")
        wait_for(lambda: "waiting for a member" in s.cluster.health()[1])
        health.append(s.cluster.health()[1])
        assert s.cluster.status().route.startswith("missing layers ")
        s.restart("beta")

    told("restart and rejoin, with a start of Python", s.check(restart))
    assert "missing layers" in health[0]
    assert "beta is gone" in health[0]
    assert s.cluster.health()[0]


def test_a_standby_takes_the_place_of_the_one_that_was_lost() -> None:
    with survival(3, head_bytes=bytes_for(7), standby=("gamma",)) as s:
        assert s.members() == ["alpha", "beta"]
        wait_for(lambda: "ready: stands by with layers" in s.log("gamma"))  # preloaded
        told("standby", s.check(lambda: s.kill("beta")))
        assert s.members() == ["alpha", "gamma"]


def test_without_anybody_to_stand_in_the_error_names_the_missing_layers() -> None:
    with survival(2, head_bytes=bytes_for(7), options={"recover_wait_s": 0.5}) as s:
        stream = s.start(PARAMS["greedy"], "Hi")
        wait_for(lambda: stream.tokens)
        s.kill("beta")
        assert stream.ended.wait(WAIT_S)
        assert "missing layers" in str(stream.error)
        assert "beta is gone" in str(stream.error)
        ready, reason = s.cluster.health()
        assert not ready
        assert "missing layers" in reason
