"""What the planner foresees for other members: once for each plan and each change of an offer."""

from __future__ import annotations

import threading

import msgspec
import pytest

from cluster.head.test_planning import SOURCE, bytes_for, hello, planner, together
from convoy.cluster.active_plan import ActivePlan
from convoy.cluster.head.forecast import ADDED_BYTES, Forecaster
from convoy.cluster.head.planning import Planner
from convoy.cluster.head.step_time import links_among
from convoy.cluster.options import HeadOptions
from convoy.cluster.status import Forecast
from convoy.engine.completion import generate
from convoy.engine.requests.request import GenerationRequest
from convoy.errors import PlanError
from convoy.model.sampling.params import SamplingParams
from convoy.plan.placement.placement import Placement
from convoy.plan.rates.rates import RatesReport, Workload, predict
from convoy.plan.span import layers_text
from convoy.plan.speed import Speed
from convoy.wire.messages.control import Hello
from support.cluster import running_cluster
from support.waiting import wait_until

SPEED = Speed(10e9, 100e9)


class Predictions:
    """Predict from one speed, once it was allowed to measure it."""

    def __init__(self) -> None:
        self.is_measured = False
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self, placement: Placement, workload: Workload, *, may_measure: bool) -> RatesReport | None:
        self.go_on.wait(10.0)
        self.is_measured |= may_measure
        if not self.is_measured:
            return None
        speeds = dict.fromkeys(placement.holders, SPEED)
        return predict(placement, speeds, links_among(placement.holders, placement.head, {}), workload)


class Scene:
    """Hold a plan over some members, and what is foreseen for it."""

    def __init__(self, **hellos: Hello) -> None:
        self.hellos = hellos
        self.planner: Planner = planner()
        first = self.planner.first(hellos)
        self.active = ActivePlan(first.plan, first.placement, {}, (256,), 2048)
        self.predictions = Predictions()
        self.forecaster = Forecaster("alpha", self.planner, self.predictions, HeadOptions())

    def look(self, *, is_idle: bool = True) -> Forecast | None:
        return self.forecaster.find(self.active, self.hellos, is_idle=is_idle)

    def found(self) -> Forecast:
        wait_until(lambda: (found := self.look()) and found.running.tokens_per_s)
        found = self.look()
        assert found is not None
        return found


def test_a_loss_that_the_others_can_take_names_their_layers_and_rate() -> None:
    found = Scene(alpha=hello(), beta=hello(), gamma=hello()).found()
    assert [loss.member for loss in found.losses] == ["beta", "gamma"]
    plan = found.losses[0].plan
    assert plan.layers == {"alpha": "layers 0-5", "gamma": "layers 6-11"}
    assert not plan.refused
    assert plan.tokens_per_s
    assert plan.max_kv_tokens > 0
    assert found.running.layers == {
        "alpha": "layers 0-3",
        "beta": "layers 4-7",
        "gamma": "layers 8-11",
    }
    assert found.running.tokens_per_s
    assert found.running.limit


def test_a_loss_that_no_other_can_take_says_both_numbers() -> None:
    tight = hello(bytes_for(8))
    plan = Scene(alpha=tight, beta=tight).found().losses[0].plan
    assert plan.refused.startswith("stage 0 on alpha needs ")
    assert " for layers 0-11 but has " in plan.refused
    assert [plan.layers, plan.tokens_per_s] == [{}, None]


def test_one_more_machine_is_like_the_head_and_makes_room() -> None:
    tight = hello(bytes_for(8))
    scene = Scene(alpha=tight, beta=tight)
    found = scene.found()
    assert found.added_bytes == ADDED_BYTES
    assert set(found.added.layers) == {"alpha", "beta", "one more"}
    assert found.added.max_kv_tokens > found.running.max_kv_tokens


def test_a_forecast_is_what_the_planner_then_does() -> None:
    scene = Scene(alpha=hello(), beta=hello(bytes_for(9)), gamma=hello(bytes_for(5)))
    foreseen = {loss.member: loss.plan.layers for loss in scene.found().losses}
    for name in ("beta", "gamma"):
        others = {other: one for other, one in scene.hellos.items() if other != name}
        stages = scene.planner.again(others, scene.active.placement).plan.stages
        assert foreseen[name] == {one.member: layers_text(one.start, one.end) for one in stages}


def test_it_is_computed_once_until_an_offer_changes() -> None:
    scene = Scene(alpha=hello(), beta=hello())
    found = scene.found()
    assert scene.look() is found
    scene.hellos = scene.hellos | {"gamma": hello()}
    assert scene.look() is None
    assert set(scene.found().losses[0].plan.layers) == {"alpha", "gamma"}


def test_a_look_never_waits_for_a_measurement() -> None:
    scene = Scene(alpha=hello(), beta=hello())
    scene.predictions.go_on.clear()
    assert [scene.look(), scene.look()] == [None, None]
    scene.predictions.go_on.set()
    assert scene.found()


def test_no_request_waits_for_a_measurement() -> None:
    scene = Scene(alpha=hello(), beta=hello())
    wait_until(lambda: scene.look(is_idle=False))
    busy = scene.look(is_idle=False)
    assert busy is not None
    assert busy.running.tokens_per_s is None
    assert busy.losses[0].plan.layers == {"alpha": "layers 0-11"}
    assert scene.found().running.tokens_per_s


def test_a_machine_that_cannot_be_measured_is_tried_once() -> None:
    scene = Scene(alpha=hello(), beta=hello())
    asked: list[bool] = []

    def never(placement: Placement, workload: Workload, *, may_measure: bool) -> None:
        asked.append(may_measure)

    scene.forecaster = Forecaster("alpha", scene.planner, never, HeadOptions())
    wait_until(lambda: scene.look() and True in asked)
    wait_until(lambda: not any(thread.name == "foresee plans" for thread in threading.enumerate()))
    assert scene.look() is scene.look()
    assert asked.count(True) == 1


def test_a_foreseen_plan_measures_nothing_though_the_planner_may() -> None:
    def measures(placement: Placement) -> float:
        raise AssertionError(f"the speed of {placement.holders} was measured")

    plans = together(predict=measures)
    both = {name: hello(kernel="plain-f32") for name in ("alpha", "beta")}
    assert plans.foresee(both, None, lambda _placement: None).mode == "pipeline"
    with pytest.raises(AssertionError, match="was measured"):
        plans.foresee(both, None)


def test_a_foreseen_plan_forgets_a_failure_of_others_and_tells_no_reason_of_a_peer() -> None:
    plans = together("tensor")
    both = {name: hello(kernel="plain-f32") for name in ("alpha", "beta")}
    plans.tensor_failed(both, "10.9.8.7:7001 is silent (peer said: secret)")
    with pytest.raises(PlanError, match="their ranks could not join") as refused:
        plans.foresee(both, None)
    assert "10.9.8.7" not in refused.value.message
    others = {**both, "gamma": both["beta"], "delta": both["beta"]}
    assert plans.foresee(others, None).mode == "tensor"
    assert plans.has_failed(both), "a look changes nothing"


def test_an_error_that_nobody_foresaw_is_logged_by_its_class_and_not_met_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Scene(alpha=hello(), beta=hello())
    calls: list[bool] = []

    def breaks(placement: Placement, workload: Workload, *, may_measure: bool) -> None:
        calls.append(may_measure)
        raise RuntimeError("out of memory at a secret place")

    scene.forecaster = Forecaster("alpha", scene.planner, breaks, HeadOptions())
    assert scene.look() is None
    wait_until(lambda: "could not be foreseen: RuntimeError" in caplog.text)
    wait_until(lambda: not any(thread.name == "foresee plans" for thread in threading.enumerate()))
    assert scene.look() is None
    assert calls == [False]
    assert "secret" not in caplog.text


def test_a_head_foresees_for_http_alone_and_measures_the_step_of_a_lone_request() -> None:
    with running_cluster(SOURCE, 2) as cluster:
        assert cluster.status().lone_step_s is None
        assert cluster.status().forecast is None
        generate(cluster.engine, GenerationRequest((1, 2, 3), SamplingParams(), max_tokens=8))
        wait_until(lambda: cluster.status(foresees=True).forecast)
        told = cluster.status(foresees=True)
    assert told.forecast is not None
    assert [loss.member for loss in told.forecast.losses] == ["beta"]
    assert told.lone_step_s is not None
    assert told.lone_step_s > 0.0
    assert msgspec.json.decode(msgspec.json.encode(told), type=type(told)) == told
