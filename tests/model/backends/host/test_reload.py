"""A stage that takes another's place: what both own is not read again, and nothing else stays."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest
import torch

from convoy.errors import ModelError
from convoy.model.backends.host.stage import HostStage
from convoy.model.stage import StageOptions
from convoy.wire.messages.control import BlockGrant, Row, StageAssignment, Step
from support.cases import cases
from support.tiny_models import Models

EXACT = StageOptions(kernel="exact-f32", require_tags=False)
PLAIN = StageOptions(kernel="plain-f32", require_tags=False)
CHANGES = {
    "grows down": (StageAssignment("a", 2, 4, False, False), StageAssignment("a", 0, 4, True, False)),
    "grows up": (StageAssignment("a", 0, 2, True, True), StageAssignment("a", 0, 5, True, True)),
    "shrinks": (StageAssignment("a", 1, 5, False, False), StageAssignment("a", 2, 4, False, False)),
    "moves": (StageAssignment("a", 0, 3, True, False), StageAssignment("a", 2, 5, False, True)),
    "gains the output": (StageAssignment("a", 0, 5, True, False), StageAssignment("a", 0, 5, True, True)),
    "loses the embedding": (StageAssignment("a", 0, 5, True, True), StageAssignment("a", 1, 5, False, True)),
    "stays": (StageAssignment("a", 0, 5, True, True), StageAssignment("a", 0, 5, True, True)),
}


def outputs(stage: HostStage) -> list[torch.Tensor]:
    """Return a step's hidden state and logits."""
    stage.make_pools(8)
    tokens = torch.tensor([3, 1, 4, 1, 5])
    embed = stage.assignment.embed
    hidden = None if embed else torch.randn(5, stage.hidden_size, generator=torch.Generator().manual_seed(1))
    step = Step(0, [], [BlockGrant.append(0, 0, [0])], [Row(0, 0, 5, 5)], b"")
    out = stage.run(step, hidden=hidden, tokens=tokens if embed else None)
    return [out, stage.output(out)] if stage.assignment.output else [out]


# Each change of one model, packed, and two of the other, as stored.
QUICK = {"odd": ("exact-f32", set(CHANGES)), "even": ("plain-f32", {"moves", "gains the output"})}


def is_quick(case: tuple[str, str, str]) -> bool:
    change, kind, kernel = case
    quick_kernel, changes = QUICK[kind]
    return kernel == quick_kernel and change in changes


@pytest.mark.parametrize(
    ("change", "kind", "kernel"),
    cases(itertools.product(CHANGES, ("odd", "even"), ("exact-f32", "plain-f32")), is_quick),
)
def test_a_stage_made_of_another_computes_as_one_that_was_read_whole(
    models: Models, change: str, kind: str, kernel: str
) -> None:
    source, options = models.source(kind), StageOptions(kernel=kernel, require_tags=False)
    first, second = CHANGES[change]
    fresh = HostStage.load(source, second, options)
    before = HostStage.load(source, first, options)
    reused = HostStage.load(source, second, options, before=before)
    assert reused.bytes_read < fresh.bytes_read
    assert reused.weight_bytes <= fresh.weight_bytes
    for found, expected in zip(outputs(reused), outputs(fresh), strict=True):
        assert torch.equal(found, expected)


def test_only_the_missing_layers_are_read_and_told(models: Models) -> None:
    source = models.source("odd")
    before = HostStage.load(source, StageAssignment("a", 1, 4, False, False), EXACT)
    told: list[tuple[int, int]] = []
    after = HostStage.load(
        source, StageAssignment("a", 2, 5, False, False), EXACT, lambda *now: told.append(now), before=before
    )
    layer = sum(t.num_bytes for n, t in source.tensors.items() if n.startswith("model.layers.4."))
    assert after.bytes_read == layer
    assert told[-1] == (layer, layer)


def test_what_is_not_owned_any_more_is_free_before_the_rest_is_read(models: Models) -> None:
    source = models.source("odd")
    before = HostStage.load(source, StageAssignment("a", 0, 3, True, False), EXACT)
    gone = weakref.ref(before.layers[0])
    alive: list[bool] = []

    def look(_loaded: int, _total: int) -> None:
        if not alive:
            gc.collect()
        alive.append(gone() is not None)

    HostStage.load(source, StageAssignment("a", 1, 4, False, False), EXACT, look, before=before)
    assert alive
    assert not any(alive)


def test_nothing_of_another_kernel_is_used(models: Models) -> None:
    source = models.source("odd")
    whole = StageAssignment("a", 0, 5, True, True)
    plain = HostStage.load(source, whole, PLAIN)
    exact = HostStage.load(source, whole, EXACT, before=plain)
    assert exact.bytes_read == HostStage.load(source, whole, EXACT).bytes_read


def test_the_stage_before_is_over_even_where_the_next_cannot_be_loaded(models: Models) -> None:
    source = models.source("odd")
    before = HostStage.load(source, StageAssignment("a", 0, 3, True, False), EXACT)
    with pytest.raises(ModelError):
        HostStage.load(source, StageAssignment("a", 4, 9, False, False), EXACT, before=before)
    assert not before.layers
