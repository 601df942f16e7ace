"""What a step takes beside weights and K/V, as the allocator saw it, against the plan's bound."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.stage import StageOptions
from convoy.plan.memory.working import working_bytes
from convoy.wire.messages.control import BlockGrant, Row, StageAssignment, Step
from support.compiled import nothing_compiled
from support.tiny_models import Models

NUM_TOKENS = 256


def most_bytes(stage: HostStage) -> int:
    """Return the peak of bytes in use while the second of two chunks runs, beyond those in use before."""
    blocks = list(range(2 * NUM_TOKENS // 16))
    stage.make_pools(len(blocks))
    grants = [BlockGrant.append(0, group, blocks) for group in range(len(stage.block_bytes))]

    def run(start: int) -> None:
        step = Step(0, [], [] if start else grants, [Row(0, start, NUM_TOKENS, 1)], b"")
        hidden = stage.run(step, None, torch.arange(NUM_TOKENS) % 100)
        stage.output(stage.select(step, hidden))

    run(0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run(NUM_TOKENS)
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    most = now = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize("kind", ["demo", "qwen3_moe", "gemma3", "deepseek_v3"])
def test_a_step_takes_no_more_than_the_plan_says_and_not_much_less(models: Models, kind: str) -> None:
    source = ModelSource.resolve(kind) if kind == "demo" else models.source(kind)
    num_layers = source.spec.num_layers
    assignment = StageAssignment("a", 0, num_layers, True, True)
    options = StageOptions(kernel="plain-f32", require_tags=False)
    bound = working_bytes(source.spec, 0, num_layers, output=True, num_tokens=NUM_TOKENS)
    stage = HostStage.load(source, assignment, options)
    # Compiled attention reads K/V in place. A plan counts with members that have none.
    assert most_bytes(stage) <= bound
    with nothing_compiled():
        assert 0.3 * bound < most_bytes(stage) <= bound
