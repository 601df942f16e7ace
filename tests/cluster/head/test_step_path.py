"""Where a step spends its time: parts that add up, also when clocks are placed wrongly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from convoy.cluster.head.step_path import StepPaths, find_step_path, split_step
from convoy.cluster.status import StepPath
from convoy.engine.completion import generate
from convoy.engine.requests.request import GenerationRequest
from convoy.engine.run.stage_worker import StepLog, StepMarks, marks_of
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.params import SamplingParams
from convoy.wire.messages.control import MAX_MARKED_STEPS, Plan, StageAssignment
from support.cluster import running_cluster

HEAD = StepMarks(7, 10.0, 10.1, 10.3, 10.4, returned_s=12.0, taken_s=12.2, ended_s=12.5)


def about(seconds: float) -> Any:
    return pytest.approx(seconds)


def total_s(path: StepPath) -> float:
    return sum(part.wire_s + part.wait_s + part.compute_s + part.seal_s for part in path.parts)


def test_peers_are_asked_again_only_after_another_step_or_plan() -> None:
    beta = StepMarks(7, 10.6, 10.7, 11.2, 11.3)
    plan = Plan(
        *(
            1,
            "demo",
            "ab",
            [StageAssignment("alpha", 0, 2, True, True), StageAssignment("beta", 2, 4, False, False)],
        ),
        *("exact-f32", "float32", 16, 2048),
    )
    asked: list[int] = []

    def ask(plan_id: int, names: set[str], timeout_s: float) -> dict[str, list[StepMarks]]:
        asked.append(plan_id)
        return {"beta": [beta]}

    paths = StepPaths()
    first = paths.find(plan, "alpha", [HEAD], ask)
    assert first is not None
    assert paths.find(plan, "alpha", [HEAD], ask) is first
    assert asked == [1]
    later = replace(HEAD, number=8)
    # Beta does not tell of step 8 yet, so it is asked each time.
    for _ in range(2):
        assert paths.find(plan, "alpha", [HEAD, later], ask) == first
    assert paths.find(msgspec.structs.replace(plan, plan_id=2), "alpha", [HEAD], ask) == first
    assert asked == [1, 1, 1, 2]


def test_each_part_of_a_step_is_found_at_its_member() -> None:
    beta = StepMarks(7, 10.6, 10.7, 11.2, 11.3)
    path = split_step("alpha", HEAD, [("beta", beta)])
    assert [path.number, path.step_s] == [7, about(2.5)]
    assert total_s(path) == pytest.approx(2.5)
    begin, there, end = path.parts
    assert [begin.member, begin.compute_s, begin.seal_s] == ["alpha", about(0.2), about(0.2)]
    assert [there.wire_s, there.wait_s, there.compute_s, there.seal_s] == list(
        map(about, (0.2, 0.1, 0.5, 0.1))
    )
    assert [end.wire_s, end.wait_s, end.compute_s] == list(map(about, (0.7, 0.2, 0.3)))


@pytest.mark.parametrize("wrong_s", [-5.0, -0.5, 0.1, 0.5, 5.0])
def test_a_clock_placed_wrongly_moves_time_between_hops_alone(wrong_s: float) -> None:
    marks = [at_s + wrong_s for at_s in (10.6, 10.7, 11.2, 11.3)]
    path = split_step("alpha", HEAD, [("beta", StepMarks(7, *marks))])
    assert total_s(path) == pytest.approx(2.5)
    assert path.parts[1].compute_s == pytest.approx(0.5)
    assert min(part.wire_s for part in path.parts) >= 0.0


def test_only_the_last_steps_are_kept_and_told_in_microseconds() -> None:
    log = StepLog()
    for number in range(40):
        log.add(StepMarks(number, 1.0, 1.1, 1.2, 1.3))
    assert [one.number for one in log.ended()] == list(range(40 - MAX_MARKED_STEPS, 40))
    told = log.answer()[-1]
    assert told.arrived_us - told.sent_us == pytest.approx(300_000, abs=2)
    placed = marks_of([told], 500.0)[0]
    assert placed.sent_s - placed.arrived_s == pytest.approx(0.3, abs=1e-5)


@pytest.fixture
def two_members() -> Plan:
    stages = [StageAssignment("alpha", 0, 2, True, True), StageAssignment("beta", 2, 4, False, False)]
    return Plan(1, "demo", "ab", stages, "exact-f32", "float32", 16, 2048)


def test_a_step_that_a_member_no_longer_knows_is_not_shown(two_members: Plan) -> None:
    beta = {"beta": [StepMarks(6, 1.0, 1.0, 1.0, 1.0)]}
    assert find_step_path(two_members, "alpha", [HEAD], lambda *_: beta) is None
    assert find_step_path(two_members, "alpha", [HEAD], lambda *_: {}) is None
    assert find_step_path(two_members, "alpha", [], lambda *_: beta) is None


@pytest.mark.parametrize(
    ("spans", "way"),
    [
        (None, ["alpha", "beta", "gamma", "alpha"]),
        # The last member samples.
        ({"alpha": "0:0", "beta": "1:2", "gamma": "3:output"}, ["alpha", "beta", "gamma", "alpha"]),
        # The head ends each step, and a peer begins it.
        ({"alpha": "3:output", "beta": "0:1", "gamma": "2:2"}, ["alpha", "beta", "gamma", "alpha"]),
    ],
)
def test_the_parts_of_a_real_step_add_up_to_it(spans: dict[str, str] | None, way: list[str]) -> None:
    with running_cluster(ModelSource.resolve("demo-mini"), 3, spans=spans) as cluster:
        generate(cluster.engine, GenerationRequest((1, 2, 3), SamplingParams(), max_tokens=8))
        path = cluster.status().step_path
    assert path is not None
    assert [part.member for part in path.parts] == way
    assert total_s(path) == pytest.approx(path.step_s, rel=0.05)
    assert all(part.compute_s > 0.0 for part in path.parts[1:-1])
    assert path.parts[0].seal_s > 0.0
