"""A member that came back, and an engine that is never idle."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import pytest
from msgspec.structs import replace as change

from cluster.recovery.test_recovery import Scene, ask, scene, small, stages
from convoy.cluster.options import RebalanceOptions
from convoy.cluster.presence.peers import Peers
from convoy.cluster.presence.slow_members import SlowMembers
from convoy.cluster.recovery.rebalance import Rebalancer
from convoy.cluster.recovery.recovery import StageRecovery
from convoy.cluster.running import RunningCluster
from convoy.engine.outputs import ErrorOutput, FinishOutput, Output, TokenOutput
from convoy.engine.requests.request import GenerationRequest
from convoy.errors import StageLost
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.params import SamplingParams
from convoy.wire.messages.control import StepFailed
from support.waiting import wait_until

# A member that comes is used soon after it came, while something runs. Without ``max_at_once``, a moment
# without work would do.
SOON = RebalanceOptions(busy_s=0.1, max_at_once=0)
LOAD = GenerationRequest(tuple(range(5, 25)), SamplingParams(temperature=0.0), 60, ignore_eos=True)


class Load:
    """Ask one request after the other, so that one always runs; ``texts`` are their tokens."""

    def __init__(self, cluster: RunningCluster) -> None:
        self._cluster = cluster
        self._stopping = threading.Event()
        self.texts: list[tuple[int, ...]] = []
        self.errors: list[object] = []
        self._running = [self._start(), self._start()]

    def _start(self) -> threading.Event:
        ended, tokens = threading.Event(), list[int]()

        def take(output: Output) -> None:
            if isinstance(output, TokenOutput):
                tokens.append(output.token_id)
                if len(tokens) == 30 and not self._stopping.is_set():  # the next, long before the end
                    threading.Thread(target=self._go_on, daemon=True).start()
            elif isinstance(output, FinishOutput | ErrorOutput):
                self.texts.append(tuple(tokens))
                self.errors += [output] if isinstance(output, ErrorOutput) else []
                ended.set()

        self._cluster.engine.submit(replace(LOAD, cache_salt=bytes(3)), take)
        return ended

    def _go_on(self) -> None:
        self._running.append(self._start())

    def stop(self) -> None:
        self._stopping.set()
        wait_until(lambda: all(ended.is_set() for ended in list(self._running)))


@contextmanager
def loaded(cluster: RunningCluster) -> Iterator[Load]:
    load = Load(cluster)
    try:
        yield load
    finally:
        load.stop()


def lose_gamma_and_let_it_come_back(s: Scene, rebalance: RebalanceOptions) -> RunningCluster:
    s.join("beta")
    gone = s.join("gamma")
    cluster = s.serve(num_blocks=64, rebalance=rebalance)
    gone.stop()
    wait_until(lambda: stages(cluster) == ["alpha", "beta"])
    return cluster


@pytest.mark.long
def test_one_that_came_back_is_used_although_something_always_runs() -> None:
    with scene("beta", "gamma") as s:
        cluster = lose_gamma_and_let_it_come_back(s, SOON)
        with loaded(cluster) as load:
            s.join("gamma")
            wait_until(lambda: stages(cluster) == ["alpha", "beta", "gamma"])
        assert not load.errors
        assert len(set(load.texts)) == 1, "one text: on the old stages, on the new, and across both"
        assert cluster.engine.stats().recoveries == 1


def never_loads(monkeypatch: pytest.MonkeyPatch, over: threading.Event) -> None:
    """Make peers read on for ever from now on, until ``over``."""
    load: Callable[..., HostStage] = HostStage.load

    def slowly(
        source: ModelSource, mine: object, options: object, progress: object, **kept: object
    ) -> HostStage:
        while mine.member != "alpha" and not over.wait(0.02):  # type: ignore[attr-defined]
            progress(1, 2)  # type: ignore[operator]
        return load(source, mine, options, progress, **kept)

    monkeypatch.setattr(HostStage, "load", slowly)


def break_the_ring(cluster: RunningCluster, s: Scene, name: str) -> None:
    assert cluster.head.active_plan is not None
    link = s.peers[name].peer.head
    assert link is not None
    link.send(StepFailed(0, "the ring is broken"), plan_id=cluster.head.active_plan.plan.plan_id)


def watch_arrivals(cluster: RunningCluster) -> queue.SimpleQueue[str]:
    """Return names of members that came, each once the head has considered it."""
    considered: queue.SimpleQueue[str] = queue.SimpleQueue()
    consider = cluster.head.on_joined

    def joined(name: str) -> None:
        consider(name)
        considered.put(name)

    cluster.head.on_joined = joined
    return considered


def lose_gamma_and_let_it_come_back_too_soon(
    s: Scene, monkeypatch: pytest.MonkeyPatch, rebalance: RebalanceOptions
) -> RunningCluster:
    """Lose gamma. It redials while the others load for the plan without it, and is considered in vain."""
    loaded = threading.Event()
    s.stack.callback(loaded.set)
    for name in ("beta", "gamma"):
        s.join(name)
    cluster = s.serve(num_blocks=64, rebalance=rebalance)
    considered = watch_arrivals(cluster)
    never_loads(monkeypatch, loaded)
    s.peers["gamma"].stop()
    wait_until(lambda: "loading at beta: " in cluster.health()[1])
    s.join("gamma")
    assert considered.get(timeout=30) == "gamma"
    assert "loading at beta: " in cluster.health()[1], "the recovery is not over yet"
    loaded.set()
    wait_until(lambda: cluster.engine.stats().recoveries == 1)
    return cluster


def test_a_member_that_comes_back_during_the_recovery_is_used_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with scene("beta", "gamma") as s:
        cluster = lose_gamma_and_let_it_come_back_too_soon(s, monkeypatch, RebalanceOptions())
        wait_until(lambda: stages(cluster) == ["alpha", "beta", "gamma"])
        assert ask(cluster) == "17"
        assert cluster.engine.stats().recoveries == 1


def test_a_member_that_comes_back_during_the_recovery_is_used_although_something_always_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with scene("beta", "gamma") as s:
        cluster = lose_gamma_and_let_it_come_back_too_soon(s, monkeypatch, SOON)
        with loaded(cluster) as load:
            wait_until(lambda: stages(cluster) == ["alpha", "beta", "gamma"])
        assert not load.errors
        assert len(set(load.texts)) == 1


def test_a_member_without_a_stage_is_in_the_status_with_the_time_since() -> None:
    with scene("beta", "gamma") as s:
        began_s = time.time()
        cluster = lose_gamma_and_let_it_come_back(s, RebalanceOptions(busy_s=600.0, max_at_once=0))
        assert cluster.status().idle == []
        s.join("gamma")
        wait_until(lambda: [one.name for one in cluster.status().idle] == ["gamma"])
        assert began_s <= cluster.status().idle[0].since_unix_s <= time.time()


@pytest.mark.long
def test_a_recovery_is_bounded_as_a_whole_and_says_its_reason_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    over = threading.Event()
    with scene("beta") as s:
        s.join("beta")
        cluster = s.serve(member=small(), recover_wait_s=0.5)
        recovery = cluster.engine.recovery
        assert isinstance(recovery, StageRecovery)
        assert recovery.whole_s == 600.5
        recovery.whole_s = 2.0  # a load may take longer where a test begins
        s.stack.callback(over.set)
        never_loads(monkeypatch, over)
        break_the_ring(cluster, s, "beta")
        with pytest.raises(StageLost, match=r"^nobody took over within 2 s: .*beta") as gone:
            ask(cluster)
        assert gone.value.message.count("nobody took over") == 1
        first = recovery.gave_up
        wait_until(lambda: recovery.gave_up is not first)  # it looked a second time, as vainly
        assert caplog.text.count("nothing can run now") == 1
        told = [record for record in caplog.records if "cannot go on: the ring is broken" in record.message]
        assert len(told) == 1, "the loss is told once, however often somebody looks"
        over.set()
        assert ask_when_ready(cluster) == "17"


def test_a_head_that_may_not_wait_looks_for_stages_with_pauses(caplog: pytest.LogCaptureFixture) -> None:
    with scene("beta") as s:
        s.join("beta")
        cluster = s.serve(member=small(), recover_wait_s=0)
        s.peers["beta"].stop()
        wait_until(lambda: "nothing can run now" in caplog.text)
        recovery = cluster.engine.recovery
        assert isinstance(recovery, StageRecovery)
        first = recovery.gave_up
        wait_until(lambda: recovery.gave_up is not first)
        assert caplog.text.count("nothing can run now") == 1
        s.join("beta")
        assert ask_when_ready(cluster) == "17"


def ask_when_ready(cluster: RunningCluster) -> str:
    wait_until(lambda: cluster.health()[0])
    return ask(cluster)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_defect_in_the_heads_own_stage_stops_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with scene("beta") as s:
        s.join("beta")
        cluster = s.serve()
        own, run = cluster.head.stage, HostStage.run

        def fail(stage: HostStage, *args: object, **names: object) -> object:
            if stage is own:
                raise RuntimeError("out of memory")
            return run(stage, *args, **names)  # type: ignore[arg-type]

        monkeypatch.setattr(HostStage, "run", fail)
        for _ in range(2):
            with pytest.raises(StageLost, match="the engine met an internal error"):
                ask(cluster)
        assert cluster.health() == (False, "the engine met an internal error")


def test_standbys_are_in_the_status_with_what_they_hold() -> None:
    with scene("beta", "gamma", "delta") as s:
        s.join("beta")
        standby, other = (s.join(name, standby=True) for name in ("gamma", "delta"))
        cluster = s.serve(member=small())
        lost = cluster.status().stages[1]
        layers = f"{lost.start}-{lost.end - 1}"
        assert f"stands by with layers {layers}" in standby.wait_for("ready").text
        wait_until(lambda: all(one.layers for one in cluster.status().standbys))
        found = [(one.name, one.layers) for one in cluster.status().standbys]
        assert found == [("delta", layers), ("gamma", layers)]
        other.stop()
        wait_until(lambda: [one.name for one in cluster.status().standbys] == ["gamma"])
        s.join("delta", standby=True).wait_for("ready")
        assert standby.events.empty(), "it was asked once, whoever came later"
        s.peers["beta"].stop()
        wait_until(lambda: "beta" not in [stage.member for stage in cluster.status().stages])
        wait_until(lambda: len(cluster.status().standbys) == 1)


def test_a_plan_of_other_layers_does_not_wait_for_one_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    with scene("beta", "gamma") as s:
        s.join("beta")
        standby = s.join("gamma", standby=True)
        cluster = s.serve(member=small())
        standby.wait_for("ready")
        s.stack.callback(over.set)
        active = cluster.head.active_plan
        assert active is not None
        never_loads(monkeypatch, over)
        link = cluster.head.links["gamma"]
        for number, cut in ((1, 1), (2, 2), (3, 2)):
            hello = cluster.head.hellos()["gamma"]
            alpha, gamma = cluster.head.planner.in_place_of(active.plan, "beta", "gamma", hello).stages
            halves = [change(alpha, end=cut), change(gamma, start=cut)]
            plan = change(active.plan, stages=halves, plan_id=active.plan.plan_id + number)
            link.send(plan, plan_id=plan.plan_id)
            if number == 2:
                assert "a newer plan came while this one was loaded" in standby.wait_for("refused").text
            if number < 3:
                standby.wait_for("loading")
        over.set()
        assert "layers 2-3" in standby.wait_for("ready").text, "what both want is loaded to its end"
        assert "layers 2-3" in standby.wait_for("ready").text


class FakeCompany:
    """Report every member as here, while no time passes."""

    def __init__(self) -> None:
        self.slow = SlowMembers()
        self.closed = threading.Event()
        self.waits_s: queue.SimpleQueue[float] = queue.SimpleQueue()

    def present(self) -> dict[str, None]:
        return {"beta": None, "gamma": None}

    def closed_within(self, timeout_s: float) -> bool:
        self.waits_s.put(timeout_s)
        return self.closed.wait()


class FakeRecovery:
    """Plan with gamma, which is better than the plan that runs, with beta."""

    def without_stage(self) -> set[str]:
        return {"gamma"}

    def would_use(self, name: str) -> bool:
        return name == "gamma"


def never(_work: object) -> None:
    raise AssertionError("nothing is done between two steps here")


@contextmanager
def renewals_over_fakes(
    num_failures: int = 0,
    peers: FakeCompany | None = None,
    between_steps: Callable[[object], None] = never,
    options: RebalanceOptions | None = None,
) -> Iterator[tuple[Rebalancer, FakeCompany, queue.SimpleQueue[str]]]:
    """Yield a rebalancer. Its first ``num_failures`` preparations fail."""
    peers, asked, prepared = peers or FakeCompany(), queue.SimpleQueue[str](), list[str]()

    def prepare(name: str, then: Callable[[], None], failed: Callable[[], None]) -> None:
        prepared.append(name)
        failed() if len(prepared) <= num_failures else then()

    try:
        yield (
            Rebalancer(
                cast(Peers, peers),
                cast(StageRecovery, FakeRecovery()),
                asked.put,
                between_steps,
                prepare,
                options=options or RebalanceOptions(),
            ),
            peers,
            asked,
        )
    finally:
        peers.closed.set()


def test_a_plan_that_begins_has_every_member_without_a_stage_considered() -> None:
    with renewals_over_fakes() as (renewals, _, asked):
        renewals.plan_began(())
        assert asked.get(timeout=30) == "gamma is here"


def test_a_member_with_which_no_plan_came_to_run_is_not_tried_again_at_once() -> None:
    with renewals_over_fakes() as (renewals, peers, asked):
        renewals.plan_began({"beta", "gamma"})
        peers.waits_s.get(timeout=30)
        assert renewals.left_s("gamma") > RebalanceOptions().busy_s, "as long as after an interruption"
        assert asked.empty()


def test_a_member_that_comes_anew_is_tried_although_it_was_in_vain_before() -> None:
    with renewals_over_fakes() as (renewals, peers, asked):
        renewals.plan_began({"gamma"})
        peers.waits_s.get(timeout=30)
        renewals.joined("gamma")
        assert asked.get(timeout=30) == "gamma is here"


def test_a_member_that_waits_already_is_not_counted_twice() -> None:
    with renewals_over_fakes() as (renewals, peers, asked):
        renewals.joined("gamma")
        peers.waits_s.get(timeout=30)
        assert asked.get(timeout=30)
        renewals.look_round(set())
        assert asked.empty()


class TimeForCompany(FakeCompany):
    """Time passes."""

    def closed_within(self, timeout_s: float) -> bool:
        self.waits_s.put(timeout_s)
        return self.closed.wait(timeout_s)


def test_one_that_comes_again_and_again_interrupts_once_in_some_minutes() -> None:
    interrupted: queue.SimpleQueue[object] = queue.SimpleQueue()
    with renewals_over_fakes(0, TimeForCompany(), interrupted.put, SOON) as (renewals, _, asked):
        renewals.joined("gamma")
        assert interrupted.get(timeout=30)
        renewals.joined("gamma")
        assert renewals.left_s("gamma") > SOON.again_s / 2, "it interrupted a moment ago"
        assert interrupted.empty()
        assert asked.empty()


def test_a_member_whose_preparation_failed_is_prepared_again() -> None:
    at_once = RebalanceOptions(busy_s=0.01, again_s=0.01)
    worked = threading.Event()

    def between_steps(_work: object) -> None:
        worked.set()

    with renewals_over_fakes(3, TimeForCompany(), between_steps, at_once) as (renewals, _, _asked):
        renewals.joined("gamma")
        assert worked.wait(30), "the fourth preparation succeeds"


def test_a_member_whose_preparations_fail_waits_twice_as_long_each_time() -> None:
    with renewals_over_fakes(9) as (renewals, peers, asked):
        renewals.joined("gamma")
        peers.waits_s.get(timeout=30)
        again_s = RebalanceOptions().again_s
        assert again_s * 0.5 < renewals.left_s("gamma") <= again_s
        for _ in range(2):
            renewals.begin("gamma")
        assert again_s * 3.5 < renewals.left_s("gamma") <= again_s * 4
        renewals.plan_began(())
        assert asked.empty()
        assert peers.waits_s.empty(), "one thread waits for it"
