"""Which standby loads the stage of the largest peer in advance."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cluster.head.test_planning import SOURCE, hello, planner
from convoy.cluster.active_plan import ActivePlan
from convoy.cluster.head.standbys import Standbys
from convoy.config.kernels import held_form
from convoy.wire.messages.control import Plan


class Asked:
    """Serve as a link, and record the plans that are posted to it."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []

    def post(self, message: Plan) -> None:
        self.plans.append(message)


@pytest.mark.parametrize(
    ("unpacks", "fits_in", "is_asked"),
    [(False, False, True), (True, False, False), (True, True, True)],
)
def test_a_standby_loads_a_stage_that_fits_in_the_form_in_which_it_holds_weights(
    unpacks: bool, fits_in: bool, is_asked: bool
) -> None:
    plans = planner()
    first = plans.first({"alpha": hello(), "beta": hello()})
    stage = first.plan.stages[1]
    kept, unpacked = (
        SOURCE.spec.weight_bytes(stage.start, stage.end, embed=False, output=False, dtype=form)
        for form in ("exact-f32", held_form("exact-f32", unpacks=True))
    )
    active = ActivePlan(first.plan, first.placement, {"alpha": 1, "beta": kept}, (1,), 128)
    waiting = hello(unpacked if fits_in else kept, standby=True)
    link = Asked()
    present: Any = {"gamma": (link, msgspec.structs.replace(waiting, unpacks=unpacks))}
    Standbys().preload_largest(active, "alpha", present, plans.in_place_of)
    assert len(link.plans) == is_asked
