"""How much a head lets run at once: the limits of its options for a plan, and refused options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from convoy.cluster.options import HeadOptions
from convoy.config.table import MAX_IN_FLIGHT
from convoy.engine.run.stage_worker import StageRoute
from convoy.errors import ConfigError
from convoy.model.checkpoints.synthetic import CONFIGS
from convoy.plan.cost import TokenCost
from convoy.plan.spec.model import ModelSpec
from convoy.transport.link.inbox import Inbox

SPEC = ModelSpec.from_config(CONFIGS["llama-250m"], "llama-250m")


@pytest.mark.parametrize(
    ("changes", "num_stages", "micro_batches", "depth"),
    [
        ({}, 1, 1, 1),
        ({}, 2, 2, 2),
        ({}, 3, 3, 3),
        ({"micro_batches": 5}, 3, 5, 5),
        ({"micro_batches": 1}, 3, 1, 1),
        ({"prefill_window": 8}, 2, 2, 8),
        ({"micro_batches": 4, "prefill_window": 2}, 2, 4, 4),
        ({"micro_batches": 4, "prefill_window": 8}, 1, 1, 1),
        ({"micro_batches": MAX_IN_FLIGHT}, 2, MAX_IN_FLIGHT, MAX_IN_FLIGHT),
    ],
)
def test_as_many_steps_are_in_flight_as_stages_or_as_was_asked(
    changes: dict[str, Any], num_stages: int, micro_batches: int, depth: int
) -> None:
    options = replace(HeadOptions(), **changes)
    options.check()
    limits = options.limits(SPEC, num_stages=num_stages, num_blocks=(8,), block_size=16)
    assert (limits.micro_batches, options.depth(num_stages)) == (micro_batches, depth)
    assert limits.max_chunks <= depth, "an executor takes every chunk that the scheduler lets go"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"micro_batches": 65}, "micro_batches is 65, expected 0 to 64 steps in flight"),
        ({"micro_batches": -1}, "micro_batches is -1, expected 0 to 64 steps in flight"),
        ({"prefill_window": 1000}, "prefill_window is 1000, expected 0 to 64 steps in flight"),
        ({"max_batch": 0}, "max_batch is 0, expected 1 to 256 sequences"),
        ({"prefill_chunk": -1}, "prefill_chunk is -1, expected 0 to 16384 tokens"),
        ({"max_step_tokens": 20_000}, "max_step_tokens is 20000, expected 1 to 16384 tokens"),
    ],
)
def test_absurd_numbers_are_refused_by_name(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=f"^{told}$"):
        replace(HeadOptions(), **changes).check()


def test_a_longer_context_than_the_models_is_refused_with_both_numbers() -> None:
    HeadOptions(max_context=SPEC.max_context).check_context(SPEC)
    longer = SPEC.max_context + 1
    told = f"max_model_len is {longer} tokens, and the model's context has {SPEC.max_context}"
    with pytest.raises(ConfigError, match=f"^{told}$"):
        HeadOptions(max_context=longer).check_context(SPEC)


def test_no_queue_on_the_way_is_shorter_than_the_most_steps_in_flight() -> None:
    assert StageRoute.__dataclass_fields__["max_steps"].default == MAX_IN_FLIGHT
    inbox: Inbox[int] = Inbox()
    for number in range(MAX_IN_FLIGHT):
        inbox.put("a link", number, 1)  # would wait for ever, were there no room
    assert [inbox.get(0) for _ in range(MAX_IN_FLIGHT)] == list(range(MAX_IN_FLIGHT))


def test_a_chunk_that_is_larger_than_a_step_makes_the_step_larger() -> None:
    limits = HeadOptions(prefill_chunk=2048).limits(SPEC, num_stages=2, num_blocks=(8,), block_size=16)
    assert (limits.prefill_chunk, limits.max_step_tokens) == (2048, 2048)


def test_level_chunks_can_be_turned_off() -> None:
    def cost_of(options: HeadOptions) -> TokenCost | None:
        return options.limits(SPEC, num_stages=2, num_blocks=(8,), block_size=16).cost

    assert cost_of(HeadOptions()) == TokenCost.of(SPEC)
    assert cost_of(HeadOptions(level_chunks=False)) is None
