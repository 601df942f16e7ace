"""How members share a model: every row of the choice with its reason, as docs/tensor-parallel.md has them."""

from __future__ import annotations

import dataclasses

import pytest

from convoy.errors import PlanError
from convoy.plan.placement.parallel import ASKED, Asked, Mode, ParallelFacts, PredictedSteps, choose_parallel

ABLE = ParallelFacts(num_members=2, world_size=2, kernel="plain-f32", steps=PredictedSteps(0.020, 0.012))
HEADS = "tiny has 7 heads in layers of full, which 2 ranks cannot share alike"
ROOM = "stage 0 on alpha+beta needs 9.1 GB on each rank for its part of layers 0-31 but beta has 8.0 GB"
SILENT = "beta said nothing within 10 s"


def facts(**changes: object) -> ParallelFacts:
    return dataclasses.replace(ABLE, **changes)  # type: ignore[arg-type]


ROWS: list[tuple[str, Asked, ParallelFacts, Mode, str]] = [
    ("a lone member", "auto", facts(num_members=1, world_size=1), "single", "there is one member"),
    ("a lone member asked for ranks", "tensor", facts(num_members=1, world_size=1), "single", "one member"),
    ("a lone member asked to pipe", "pipeline", facts(num_members=1, world_size=1), "single", "one member"),
    ("a lone member asked to be alone", "single", facts(num_members=1, world_size=1), "single", "asked for"),
    ("single is asked for", "single", ABLE, "single", "asked for: single"),
    ("a pipeline is asked for", "pipeline", ABLE, "pipeline", "asked for: pipeline"),
    ("tensor is asked for", "tensor", ABLE, "tensor", "asked for: tensor"),
    ("tensor, though slower", "tensor", facts(steps=PredictedSteps(0.01, 0.02)), "tensor", "asked for"),
    ("tensor, though exact", "tensor", facts(kernel="exact-f32"), "tensor", "asked for: tensor"),
    ("tensor, nothing measured", "tensor", facts(steps=None), "tensor", "asked for: tensor"),
    ("no plan for the model", "auto", facts(world_size=1, model=HEADS), "pipeline", HEADS),
    ("no group of two", "auto", facts(world_size=1), "pipeline", "make no group of 2 ranks"),
    ("no room on a rank", "auto", facts(room=ROOM), "pipeline", "but beta has 8.0 GB"),
    ("the collective failed", "auto", facts(collective=SILENT), "pipeline", f"did not come up: {SILENT}"),
    ("exact mode", "auto", facts(kernel="exact-f32"), "pipeline", "the same bits over every cut"),
    ("8-bit products", "auto", facts(kernel="int8-stored"), "pipeline", "the same bits over every cut"),
    ("nothing measured", "auto", facts(steps=None), "pipeline", "nothing was measured"),
    (
        "predicted slower",
        "auto",
        facts(steps=PredictedSteps(0.010, 0.012)),
        "pipeline",
        "predicted faster than tensor parallelism: a step takes 12.0 ms as tensor, 10.0 as pipeline",
    ),
    ("predicted the same", "auto", facts(steps=PredictedSteps(0.01, 0.01)), "pipeline", "predicted faster"),
    ("predicted faster", "auto", ABLE, "tensor", "predicted faster: a step takes 12.0 ms as tensor, 20.0"),
]


@pytest.mark.parametrize(
    ("asked", "given", "mode", "reason"), [row[1:] for row in ROWS], ids=[r[0] for r in ROWS]
)
def test_every_row_has_its_mode_and_reason(
    asked: Asked, given: ParallelFacts, mode: Mode, reason: str
) -> None:
    choice = choose_parallel(asked, given)
    assert choice.mode == mode
    assert reason in choice.reason
    assert choice.reason[0].islower()
    assert not choice.reason.endswith(".")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (facts(world_size=1, model=HEADS), HEADS),
        (facts(world_size=1), "the 2 members make no group of 2 ranks"),
        (facts(room=ROOM), ROOM),
        (facts(collective=SILENT), f"the collective did not come up: {SILENT}"),
    ],
)
def test_who_asked_for_tensor_gets_it_or_an_error(given: ParallelFacts, reason: str) -> None:
    with pytest.raises(PlanError, match="tensor parallelism was asked for, and cannot be") as raised:
        choose_parallel("tensor", given)
    assert reason in raised.value.message
    assert "--parallel auto" in (raised.value.hint or "")


def test_single_and_pipeline_are_never_refused() -> None:
    worst = facts(world_size=1, model=HEADS, room=ROOM, collective=SILENT, steps=None)
    assert [choose_parallel(asked, worst).mode for asked in ASKED if asked != "tensor"] == [
        "pipeline",
        "pipeline",
        "single",
    ]
