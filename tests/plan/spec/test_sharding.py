"""What ranks can share, and what one of them has of it."""

from __future__ import annotations

from typing import Any

import pytest

from convoy.errors import PlanError
from convoy.model.checkpoints.synthetic import CONFIGS
from convoy.plan.span import Span
from convoy.plan.spec.model import ModelSpec
from convoy.plan.spec.sharding import (
    WHOLE,
    Shard,
    check_sharding,
    first_kv_head,
    rank_bytes,
    rank_spec,
    settle,
)

COMMON: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128_000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "num_local_experts": 32,
    "intermediate_size": 2880,
    "hidden_size": 2880,
}
QWEN_MOE: dict[str, Any] = {"model_type": "qwen3_moe", "num_experts": 128, "moe_intermediate_size": 768}
GEMMA: dict[str, Any] = {
    "model_type": "gemma4_text",
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "tie_word_embeddings": True,
}
GEMMA_26B: dict[str, Any] = GEMMA | {
    "enable_moe_block": True,
    "num_experts": 128,
    "moe_intermediate_size": 704,
    "hidden_size_per_layer_input": 0,
}


def spec_of(model_type: str = "llama", **changes: Any) -> ModelSpec:
    return ModelSpec.from_config(COMMON | {"model_type": model_type} | changes, "m")


@pytest.mark.parametrize(
    ("changes", "world_size", "reason"),
    [
        ({}, 3, "32 heads in layers of full, which 3 ranks"),
        (
            {"hidden_size": 1536, "num_attention_heads": 24, "num_key_value_heads": 6},
            4,
            "6 K/V heads in layers of full, which 4",
        ),
        ({"intermediate_size": 8190}, 4, "layer 0 of m has linears 8190 wide, which 4 ranks"),
        ({}, 0, "a stage of 0 ranks, expected 1 or more"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_both_numbers(
    changes: dict[str, Any], world_size: int, reason: str
) -> None:
    with pytest.raises(PlanError, match=reason):
        check_sharding(spec_of(**changes), world_size)


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("qwen3_5_text", {}, "keep recurrent state"),
        ("deepseek_v4", {"num_key_value_heads": 1, "num_attention_heads": 64}, "several hidden states"),
    ],
)
def test_layers_without_heads_to_share_are_refused_with_the_reason(
    model_type: str, changes: dict[str, Any], reason: str
) -> None:
    types = {"layer_types": ["sliding_attention"] * 4} if model_type == "deepseek_v4" else {}
    with pytest.raises(PlanError, match=reason) as caught:
        check_sharding(spec_of(model_type, **changes, **types), 2)
    assert caught.value.hint is not None


def test_one_rank_has_the_whole_model_whatever_its_layers_are() -> None:
    spec = spec_of("qwen3_5_text")
    assert rank_spec(spec, 1) == spec


def test_heads_are_shared_and_few_keys_and_values_repeated() -> None:
    (group,) = rank_spec(spec_of(), 4).cache_groups
    assert (group.num_heads, group.num_kv_heads) == (8, 2)
    (group,) = rank_spec(spec_of(num_key_value_heads=2), 8).cache_groups
    assert (group.num_heads, group.num_kv_heads) == (4, 1)
    assert [first_kv_head(2, Shard(rank, 8)) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [first_kv_head(8, Shard(rank, 4)) for rank in range(4)] == [0, 2, 4, 6]


def test_a_model_is_not_split_twice() -> None:
    with pytest.raises(PlanError, match="split over 2 ranks already"):
        rank_spec(rank_spec(spec_of(), 2), 2)


@pytest.mark.parametrize("form", ["exact-f32", "cuda-int8", "cuda-bf16"])
@pytest.mark.parametrize(
    "config",
    [
        CONFIGS["llama-250m"],
        CONFIGS["llama-3-8b"],
        COMMON | {"model_type": "qwen3"},
        COMMON | GPT_OSS,
        COMMON | QWEN_MOE,
        COMMON | GEMMA_26B,
        COMMON | GEMMA | {"hidden_size_per_layer_input": 256},
    ],
    ids=["llama-250m", "llama-3-8b", "qwen3", "gpt_oss", "qwen3_moe", "gemma4", "gemma4 e"],
)
def test_a_rank_of_two_holds_little_more_than_half(config: dict[str, Any], form: str) -> None:
    spec = ModelSpec.from_config(config, "m")
    span = Span(0, spec.num_layers, output=True)
    whole = spec.weight_bytes(0, spec.num_layers, embed=True, output=True, dtype=form)
    assert 0.5 * whole <= rank_bytes(spec, span, form, 2) <= 0.52 * whole
    assert 0.25 * whole <= rank_bytes(spec, span, form, 4) <= 0.28 * whole


def test_experts_are_shared_out_whole_where_that_is_asked_for() -> None:
    spec = spec_of(**QWEN_MOE)
    split, whole = rank_spec(spec, 4), rank_spec(spec, 4, "whole")
    assert split.layers[0].experts.elements == whole.layers[0].experts.elements
    assert {m.count for m in whole.layers[0].experts.linears} == {32, 64}  # gate and up are two for each
    span = Span(1, 3)
    # A scale belongs to a group of inputs, and both ways cut between groups.
    assert rank_bytes(spec, span, "cuda-int8", 4, "whole") == rank_bytes(spec, span, "cuda-int8", 4)


def test_experts_whose_width_does_not_divide_are_shared_out_whole_by_themselves() -> None:
    narrow = spec_of(**QWEN_MOE | {"moe_intermediate_size": 750})
    assert settle(narrow, Shard(1, 4)) == Shard(1, 4, "whole")
    assert rank_spec(narrow, 4) == rank_spec(narrow, 4, "whole")
    assert settle(spec_of(**QWEN_MOE), Shard(1, 4)) == Shard(1, 4, "split")
    assert settle(spec_of(), Shard(0, 1, "split")) == settle(spec_of(), None) == WHOLE
    with pytest.raises(PlanError, match="linears 750 wide, which 4 ranks"):
        check_sharding(spec_of(**QWEN_MOE | {"moe_intermediate_size": 750, "num_experts": 6}), 4)


def test_experts_that_cannot_be_shared_out_whole_are_refused() -> None:
    with pytest.raises(PlanError, match="6 experts, which 4 ranks"):
        check_sharding(spec_of(**QWEN_MOE | {"num_experts": 6}), 4, "whole")
    with pytest.raises(PlanError, match="no experts to share out"):
        check_sharding(spec_of(), 2, "whole")
