"""A change of the model over a running cluster: what is refused, what is freed, and what health says."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import pytest

from cluster.recovery.test_recovery import ANSWER, SOURCE, ask, scene, small
from convoy.cluster.model_loader import KnownModel, ModelLoader
from convoy.cluster.running import RunningCluster
from convoy.errors import CapacityError, StageLost, Unavailable
from convoy.model.checkpoints.source import ModelSource
from convoy.model.text.tokens import Tokenizer
from convoy.transport.link.link import Link
from convoy.wire.messages.control import Message
from convoy.wire.messages.fetch import Unload
from support.cluster import running_cluster
from support.waiting import wait_until


def loader_of(cluster: RunningCluster) -> ModelLoader:
    """Return a loader of two names for one model: a change between them is cheap, but a whole one."""
    other = ModelSource.resolve("demo-mini")
    return ModelLoader(
        cluster,
        [
            KnownModel("first", cluster.source, cluster.tokenizer),
            KnownModel("other", other, Tokenizer(other)),
        ],
    )


def test_the_model_changes_after_the_clock_went_back_by_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_cluster(SOURCE, 2) as cluster:
        loader = loader_of(cluster)
        before = cluster.head.active_plan
        assert before is not None
        earlier = before.plan.plan_id - 3600 * 10**9
        monkeypatch.setattr("time.time_ns", lambda: earlier)
        loader.load("other")
        after = cluster.head.active_plan
        assert after is not None
        assert after.plan.plan_id > before.plan.plan_id
        assert ask(cluster) == ANSWER
        loader.models["first"].tokenizer.close()


def test_a_model_that_fits_with_a_standby_alone_is_refused_while_the_present_one_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running_cluster(SOURCE, 2) as cluster:
        loader, head = loader_of(cluster), cluster.head
        own, peer = head.hellos().values()
        tight = {
            "alpha": msgspec.structs.replace(own, memory_bytes=small().memory_bytes),
            "beta": msgspec.structs.replace(peer, standby=True),
        }
        plan = head.active_plan
        assert head.planner.foresee(tight, None).holders, "after a loss the standby would count"
        monkeypatch.setattr(head, "hellos", lambda: tight)
        with pytest.raises(CapacityError, match="other does not fit the members that are here"):
            loader.load("other")
        assert (loader.loaded, head.active_plan) == ("first", plan)
        assert ask(cluster) == ANSWER
        loader.models["other"].tokenizer.close()


def test_a_peer_with_a_full_queue_is_told_to_unload_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    post = Link.post

    def post_to_full(link: Link, message: Message) -> bool:
        return not isinstance(message, Unload) and post(link, message)

    with scene("beta") as s:
        beta = s.join("beta")
        cluster = s.serve()
        monkeypatch.setattr(Link, "post", post_to_full)
        cluster.unload("nothing uses it")
        assert beta.wait_for("unloaded").text == "nothing uses it"


def test_members_are_idle_since_the_unload() -> None:
    with running_cluster(SOURCE, 2) as cluster:
        unloaded_s = time.time()
        cluster.unload("nothing uses it")
        idle = cluster.status().idle
        assert [one.name for one in idle] == ["beta"]
        assert idle[0].since_unix_s >= unloaded_s


def test_health_fails_after_a_load_that_failed_and_in_no_other_state(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_cluster(SOURCE, 1) as cluster:
        loader, load = loader_of(cluster), cluster.head.load
        meanwhile = list[tuple[bool, str]]()

        def fail(*_args: Any) -> None:
            meanwhile.append(cluster.health())
            raise StageLost("beta is gone")

        loader.unload()
        assert cluster.health()[0], "a request would load a model"
        monkeypatch.setattr(cluster.head, "load", fail)
        for _ in range(2):
            with pytest.raises(StageLost):
                loader.load("other")
            assert not cluster.health()[0]
            assert not cluster.status().ready
        assert meanwhile == [(True, "a model is being loaded")] * 2, "anybody may read it, so it names none"
        monkeypatch.setattr(cluster.head, "load", load)
        loader.load("other")
        assert cluster.health()[0]
        assert cluster.status().ready
        loader.models["first"].tokenizer.close()


def test_no_weights_are_freed_while_the_engine_still_works_on_them() -> None:
    begun, release = threading.Event(), threading.Event()

    def hold_up(*_args: Any) -> None:
        begun.set()
        assert release.wait(60)

    with running_cluster(SOURCE, 1, load_wait_s=0.01) as cluster:
        engine = cluster.engine
        engine.queue_between(hold_up)
        assert begun.wait(60)
        with pytest.raises(Unavailable, match=r"the engine did not end within 0\.01 s"):
            cluster.unload("nothing uses it")
        assert cluster.head.stage is not None
        release.set()
        wait_until(lambda: not engine.is_running)
        cluster.unload("nothing uses it")
        assert cluster.head.stage is None
