"""What a peer makes of a plan before it loads a stage: whole, in order, and with an owner of the output."""

from __future__ import annotations

from typing import cast

import pytest
from msgspec.structs import replace

from convoy.cluster.offer import require_kv
from convoy.cluster.options import MemberOptions
from convoy.cluster.peer.loaded_plan import LoadedPlan, check_plan, stage_options
from convoy.errors import Incompatible, StepError
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.transport.link.link import Link
from convoy.wire.messages.control import Activate, Plan, StageAssignment


def plan_of(*stages: tuple[str, int, int, str]) -> Plan:
    """Make a plan. Each stage's last word has ``e`` for the embedding and ``o`` for the output."""
    assigned = [StageAssignment(n, a, b, "e" in owns, "o" in owns) for n, a, b, owns in stages]
    return Plan(1, "demo", "0" * 64, assigned, "exact-f32", "float32", 16, 128)


def test_a_stage_holds_k_and_v_as_the_plan_says() -> None:
    plan = replace(plan_of(("alpha", 0, 12, "eo")), kv_dtype="q8")
    source = ModelSource.resolve("demo-mini")
    assert stage_options(plan, 0, MemberOptions(device="cpu"), source).kv_dtype == "q8"


@pytest.mark.parametrize("asked", ["fp8", "f64"])
def test_a_dtype_of_kv_that_a_peer_does_not_hold_is_refused_with_those_that_it_does(asked: str) -> None:
    with pytest.raises(Incompatible, match=f"kv_dtype is {asked}, but beta runs exact-f32, which holds K/V"):
        require_kv(asked, {"beta": "exact-f32"})


def plan_of_ranks(*ranks: list[str]) -> Plan:
    """Return stages of four layers each, by these ranks. The first stage owns the output."""
    stages = [
        StageAssignment(names[0], 4 * i, 4 * i + 4, i == 0, i == 0, names) for i, names in enumerate(ranks)
    ]
    return Plan(1, "demo", "0" * 64, stages, "exact-f32", "float32", 16, 128)


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(("alpha", 0, 4, "eo"), ("beta", 4, 12, "")),
        plan_of(("beta", 0, 4, "e"), ("alpha", 4, 12, "o")),
        plan_of(("alpha", 0, 4, "e"), ("beta", 4, 8, ""), ("gamma", 8, 12, "o")),
        plan_of(("alpha", 0, 12, "eo")),
        plan_of_ranks(["alpha", "beta"], ["gamma", "delta"], ["epsilon", "zeta"]),
    ],
)
def test_every_layout_is_taken(plan: Plan) -> None:
    check_plan(plan, 12, 128)


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (plan_of(("alpha", 0, 4, "eo"), ("beta", 5, 12, "")), r"layers \[5, 12\), expected to begin at 4"),
        (plan_of(("alpha", 0, 4, "eo"), ("beta", 3, 12, "")), r"layers \[3, 12\), expected to begin at 4"),
        (plan_of(("alpha", 0, 4, "eo"), ("beta", 4, 13, "")), "to end by 12"),
        (plan_of(("alpha", 0, 4, "eo"), ("beta", 4, 11, "")), "end at layer 11, and the model has 12"),
        (plan_of(("alpha", 0, 4, "e"), ("beta", 4, 12, "")), "one own the output, and 0 do"),
        (plan_of(("alpha", 0, 4, "eo"), ("beta", 4, 12, "o")), "one own the output, and 2 do"),
        (plan_of(("alpha", 0, 4, "o"), ("beta", 4, 12, "e")), "first stage must embed"),
        (plan_of(("alpha", 0, 4, "eo"), ("alpha", 4, 12, "")), "a member has two stages"),
        (plan_of_ranks(["alpha", "beta"], ["gamma", "alpha"], ["delta", "epsilon"]), "or two ranks"),
        (plan_of_ranks(["alpha", "alpha"], ["gamma", "beta"], ["delta", "epsilon"]), "or two ranks"),
        (plan_of_ranks(["alpha"], ["gamma", "beta"], ["delta", "epsilon"]), "1 ranks from alpha on"),
        (
            plan_of(("alpha", 0, 4, "e"), ("beta", 4, 8, "o"), ("gamma", 8, 12, "")),
            "a stage in the middle of the plan owns the output, expected the first or the last",
        ),
    ],
)
def test_a_plan_that_is_no_whole_model_is_refused_by_name(plan: Plan, told: str) -> None:
    with pytest.raises(StepError, match=told):
        check_plan(plan, 12, 128)


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (
            plan_of(("beta", 0, 4, "e"), ("alpha", 4, 8, ""), ("gamma", 8, 12, "o")),
            "alpha leads this plan, expected it to have the first stage or the last",
        ),
        (plan_of(("beta", 0, 4, "e"), ("gamma", 4, 12, "o")), "alpha leads this plan"),
        (
            plan_of(("beta", 0, 4, "eo"), ("alpha", 4, 12, "")),
            "the output on beta, expected alpha or the last stage",
        ),
    ],
)
def test_a_ring_that_does_not_begin_or_end_with_its_head_is_not_activated(plan: Plan, told: str) -> None:
    loaded = LoadedPlan(plan, b"", cast(HostStage, None), 0, room_bytes=8)
    with pytest.raises(StepError, match=told):
        loaded.activate(Activate(1, b"", [4]), "alpha", cast(Link, None))
