"""Tables by which DeepSeek V4's first layers choose experts, as files have them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.activations import ACT2FN

from convoy.errors import ModelError, StepError
from convoy.model.layers.routed import IdRouter


def router(table: list[list[int]]) -> Any:
    return SimpleNamespace(
        weight=torch.eye(4, 8),
        top_k=2,
        routed_scaling_factor=1.0,
        score_fn=ACT2FN["sigmoid"],
        tid2eid=torch.tensor(table),
    )


def test_the_table_chooses_and_the_scores_weigh() -> None:
    _, weights, numbers = IdRouter(router([[3, 0], [1, 2]]), packed=False)(
        torch.ones(3, 8), torch.tensor([1, 0, 1])
    )
    assert numbers.tolist() == [[1, 2], [3, 0], [1, 2]]
    assert torch.allclose(weights, torch.full((3, 2), 0.5)), "scores that are alike weigh alike"


@pytest.mark.parametrize(("number", "said"), [(4, "0 to 4"), (-1, "-1 to 3")])
def test_an_expert_that_is_not_there_is_refused_before_a_step(number: int, said: str) -> None:
    with pytest.raises(ModelError, match=f"tid2eid names experts {said}, expected some of 0 to 3"):
        IdRouter(router([[3, 0], [1, number]]), packed=False)


def test_a_step_without_token_ids_is_refused() -> None:
    with pytest.raises(StepError, match="got no token ids"):
        IdRouter(router([[3, 0]]), packed=False)(torch.ones(1, 8))
