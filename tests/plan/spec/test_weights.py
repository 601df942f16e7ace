"""Weights as they lie in memory, and as a token passes them."""

from __future__ import annotations

import pytest

from convoy.config.kernels import KernelForm, form_of
from convoy.errors import ModelError
from convoy.plan.cost import layer_costs
from convoy.plan.spec.model import ModelSpec
from convoy.plan.spec.weights import layer_weights

HIDDEN, BETWEEN, EXPERTS, CHOSEN = 64, 32, 8, 2
ONE_EXPERT = 3 * HIDDEN * BETWEEN
MOE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "moe_intermediate_size": BETWEEN,
    "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "mlp_only_layers": [0],
}


def moe() -> ModelSpec:
    return ModelSpec.from_config(MOE, "tiny")


def test_all_experts_lie_in_memory_and_a_token_passes_those_that_it_goes_to() -> None:
    spec = moe()
    dense, sparse = spec.layers[0], spec.layers[1]
    assert (dense.num_experts, sparse.num_experts) == (0, EXPERTS)
    assert sparse.experts.elements == EXPERTS * ONE_EXPERT
    assert sparse.num_bytes("float32") == 4 * sparse.elements
    assert layer_costs(spec)[1] == sparse.each.elements + CHOSEN * ONE_EXPERT
    assert layer_costs(spec)[0] == dense.elements


def test_a_batch_reads_more_experts_the_larger_it_is_and_never_more_than_all() -> None:
    layer = moe().layers[1]
    shares = [layer.reached_share(CHOSEN, count) for count in (1, 2, 8, 1000)]
    assert shares == sorted(shares)
    assert shares[0] == pytest.approx(CHOSEN / EXPERTS)
    assert shares[-1] == pytest.approx(1)
    assert moe().layers[0].reached_share(CHOSEN, 8) == 0, "a dense layer has none"


def test_experts_one_by_one_and_stacked_come_to_the_same() -> None:
    stacked = [
        ("mlp.experts.gate_up_proj", (EXPERTS, 2 * BETWEEN, HIDDEN)),
        ("mlp.experts.down_proj", (EXPERTS, HIDDEN, BETWEEN)),
    ]
    alone = [
        (f"mlp.experts.{number}.{name}.weight", shape)
        for number in range(EXPERTS)
        for name, shape in (
            ("gate_proj", (BETWEEN, HIDDEN)),
            ("up_proj", (BETWEEN, HIDDEN)),
            ("down_proj", (HIDDEN, BETWEEN)),
        )
    ]
    turned = [
        ("mlp.experts.gate_up_proj", (EXPERTS, HIDDEN, 2 * BETWEEN)),
        ("mlp.experts.down_proj", (EXPERTS, BETWEEN, HIDDEN)),
    ]
    assert layer_weights(stacked, HIDDEN) == layer_weights(alone, HIDDEN) == layer_weights(turned, HIDDEN)


def test_rounded_weights_take_their_bits_and_their_scales() -> None:
    assert KernelForm("float32", bits=4, group=32, scale_bytes=2).linear_bytes(10, 64) == 10 * (32 + 2 * 2)
    # In panels of 64 outputs; `lm_head` in 8 bits; inputs that fill no groups stay in the form of the file.
    kept = form_of("exact-q4")
    assert kept.linear_bytes(70, 64, kept_bytes=70 * 64 * 2) == 128 * (32 + 2 * 2)
    assert kept.linear_bytes(64, 64, head=True) == 64 * (64 + 2 * 2)
    assert kept.linear_bytes(64, 40, kept_bytes=5120) == 5120
    assert kept.linear_bytes(64, 40) == 4 * 64 * 40
    assert form_of("bfloat16").linear_bytes(30, 50) == form_of("cuda-bf16").linear_bytes(30, 50) == 3000
    # On a card, codes and scales; a matrix without a form that stays there is bfloat16.
    assert form_of("cuda-bf16").linear_bytes(30, 64, kept_bytes=1000, card_bytes=1100) == 1100
    assert form_of("cuda-bf16").linear_bytes(30, 64, kept_bytes=1000) == 2 * 30 * 64
    assert form_of("exact-f32").linear_bytes(64, 64, kept_bytes=1000, card_bytes=1100) == 1000
    with pytest.raises(ModelError, match="'float8' is no dtype and no kernel"):
        form_of("float8")


def test_a_card_unpacks_all_matrices_of_a_join_if_it_unpacks_one() -> None:
    names = [
        *(f"self_attn.{one}_proj.weight" for one in "qkvo"),
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
    ]
    tensors, kept = [(name, (HIDDEN, HIDDEN)) for name in names], dict.fromkeys(names, 1000)
    every = dict.fromkeys(names, 1100)
    assert layer_weights(tensors, HIDDEN, kept=kept, on_card=every).num_bytes("cuda-bf16") == 6 * 1100
    without = {name: size for name, size in every.items() if "v_proj" not in name}
    found = layer_weights(tensors, HIDDEN, kept=kept, on_card=without)
    assert found.num_bytes("cuda-bf16") == 3 * 1100 + 3 * 2 * HIDDEN * HIDDEN
    assert found.num_bytes("exact-f32") == 6 * 1000
