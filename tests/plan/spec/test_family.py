"""Families that differ from Llama's: their weights, heads, windows and cuts, against the library's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from convoy.errors import ModelError
from convoy.plan.spec.cache import CacheGroup
from convoy.plan.spec.model import ModelSpec
from support.tiny_models import KINDS, build_config

GEMMA_3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 7,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 105,
    "max_position_embeddings": 256,
    "sliding_window": 16,
}
GEMMA_4 = GEMMA_3 | {
    "model_type": "gemma4_text",
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
}

QWEN_3_5 = GEMMA_3 | {"model_type": "qwen3_5_text", "linear_num_key_heads": 2, "linear_num_value_heads": 4}


def spec_of(config: dict[str, Any], **changes: Any) -> ModelSpec:
    return ModelSpec.from_config({**config, **changes}, "tiny")


def meta_model(config: Any) -> Any:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config.get_text_config())  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_heads_and_windows_are_those_of_the_librarys_model(kind: str, tmp_path: Path) -> None:
    config = build_config(kind)
    config.save_pretrained(tmp_path)
    model = meta_model(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    spec = ModelSpec.from_config(json.loads((tmp_path / "config.json").read_text()), "tiny", shapes)
    beside = spec.layer_input_size * (105 + spec.hidden_size)  # what each layer has outside of itself
    for number, layer in enumerate(model.model.layers):
        elements = sum(tensor.nbytes for tensor in layer.state_dict().values()) // 4
        assert spec.layers[number].elements == elements + beside, f"layer {number}"
    whole = spec.weight_bytes(0, spec.num_layers, embed=True, output=True, dtype="float32")
    buffers = sum(tensor.nbytes for name, tensor in model.named_buffers() if name in model.state_dict())
    assert whole == sum(p.nbytes for p in model.parameters()) + buffers
    for group in spec.cache_groups:
        for number in group.layers:
            if group.kind == "recurrent":
                check_state(group, model.model.layers[number].linear_attn)
                continue
            attention = model.model.layers[number].self_attn
            if group.kind in {"entries", "pending"}:
                check_compressor(group, attention.compressor)
                continue
            if "sliding_attention" in (getattr(config.get_text_config(), "layer_types", None) or ()):
                assert attention.sliding_window == group.window
            if group.kind == "latent" and kind != "deepseek_v4":
                assert attention.kv_a_proj_with_mqa.out_features == group.head_dim
                assert attention.kv_lora_rank == group.value_dim
                continue
            assert attention.head_dim == group.head_dim == group.value_dim
            assert attention.num_key_value_groups == group.num_heads // group.num_kv_heads
    readers = {
        number
        for number, layer in enumerate(model.model.layers)
        if getattr(getattr(layer, "self_attn", None), "is_kv_shared_layer", False)
    }
    assert readers == spec.kv_sources.keys()


def check_state(group: CacheGroup, net: Any) -> None:
    assert (group.num_heads, group.num_kv_heads) == (net.num_v_heads, net.num_k_heads)
    assert (group.head_dim, group.value_dim) == (net.head_k_dim, net.head_v_dim)
    assert group.num_taps == net.conv_kernel_size
    past, state = 3 * net.conv_dim, net.num_v_heads * net.head_k_dim * net.head_v_dim
    token = net.key_dim + net.value_dim + 2 * net.num_v_heads
    assert group.state_elements == past + state + 16 * token


def check_compressor(group: CacheGroup, compressor: Any) -> None:
    series = compressor.kv_proj.out_features // compressor.head_dim
    indexer = getattr(compressor, "indexer", None)
    width = compressor.head_dim + (0 if indexer is None else indexer.head_dim)
    if group.kind == "entries":
        assert (group.window, group.stride, group.row_elements) == (None, compressor.compress_rate, width)
    else:
        assert (group.window, group.stride) == (series * compressor.compress_rate, 1)
        assert group.row_elements == 2 * series * width


@pytest.mark.parametrize(
    ("family", "required"),
    [
        ("gemma3_text", {}),
        ("gemma2", {}),
        ("gemma4_text", {}),
        ("gpt_oss", {}),
        ("qwen3_5_text", {}),
        ("qwen3_5_moe_text", {"num_hidden_layers": 4}),
        ("qwen3_moe", {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 16, "vocab_size": 9}),
        ("phi3", {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 16, "vocab_size": 9}),
        ("deepseek_v4", {"num_hidden_layers": 6}),
        ("deepseek_v3", {"num_hidden_layers": 4, "hidden_size": 8, "intermediate_size": 16, "vocab_size": 9}),
    ],
)
def test_what_is_not_written_is_what_the_library_takes_for_it(family: str, required: dict[str, Any]) -> None:
    if family in {"qwen3_moe", "phi3"}:
        required = {**required, "num_attention_heads": 32}
    if required:
        required = {**required, "max_position_embeddings": 4096, "pad_token_id": None}
    spec = ModelSpec.from_config({"model_type": family, **required}, "tiny")
    config = transformers.CONFIG_MAPPING[family](**required)
    model = meta_model(config)
    assert spec.num_layers == config.num_hidden_layers
    assert spec.vocab_size == config.vocab_size
    assert spec.max_context == config.max_position_embeddings
    assert spec.tied_embeddings == config.tie_word_embeddings
    beside = spec.layer_input_size * (getattr(config, "vocab_size_per_layer_input", 0) + spec.hidden_size)
    for number, layer in enumerate(model.model.layers):
        elements = sum(tensor.nbytes for tensor in layer.state_dict().values()) // 4
        assert spec.layers[number].elements == elements + beside, f"layer {number}"


def test_a_gemma_3_at_32k_keeps_no_more_than_its_windows_need() -> None:
    spec = spec_of(GEMMA_3, num_hidden_layers=12, max_position_embeddings=1 << 17, sliding_window=1024)
    per_token = 2 * 2 * 8 * 4  # K and V, two heads of 8, float32
    assert spec.kv_bytes(0, 12, 32768, "float32") == per_token * (2 * 32768 + 10 * 1024)


def test_deepseek_v3_keeps_a_latent_for_all_heads() -> None:
    config = GEMMA_3 | {"model_type": "deepseek_v3", "num_attention_heads": 128, "num_key_value_heads": 128}
    (group,) = spec_of(config).cache_groups
    assert (group.kind, group.num_heads, group.elements_per_token) == ("latent", 128, 512 + 64)
    assert 128 * (192 + 128) // group.elements_per_token == 71


def test_global_layers_may_have_other_heads_written_either_way() -> None:
    kinds = ["sliding_attention", "full_attention"] * 3 + ["sliding_attention"]
    spec = spec_of(GEMMA_4, layer_types=kinds, attention_k_eq_v=True)
    written = {str(layer): {"head_dim": 16, "num_key_value_heads": 1} for layer in (1, 3, 5, 6)}
    assert spec == spec_of(GEMMA_4, layer_types=kinds, attention_k_eq_v=True, per_layer_config=written)
    full, sliding = spec.cache_groups
    assert (full.layers, full.head_dim, full.num_kv_heads) == ((1, 3, 5, 6), 16, 1)  # the last is full always
    assert (sliding.layers, sliding.head_dim, sliding.num_kv_heads) == ((0, 2, 4), 8, 2)


def test_layers_that_read_the_kv_of_others_are_not_cut_from_them() -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["full_attention"]
    spec = spec_of(GEMMA_4, layer_types=kinds, num_kv_shared_layers=3)
    assert spec.kv_sources == {4: 3, 5: 2, 6: 2}
    assert spec.forbidden_cuts[3] == "layer 5 reads the K/V of layer 2"
    assert set(spec.forbidden_cuts) == {3, 4, 5, 6}
    assert [group.layers for group in spec.cache_groups] == [(2,), (0, 1, 3)]


def test_layers_with_an_input_of_their_own_need_token_ids_and_the_embedding() -> None:
    spec = spec_of(GEMMA_4, hidden_size_per_layer_input=4, vocab_size_per_layer_input=105)
    assert spec.needs_token_ids(3, 4)
    own = 4 * spec.layers[3].elements
    embedding = spec.embed_bytes("float32")
    assert spec.weight_bytes(3, 4, embed=False, output=False, dtype="float32") == own + embedding + 4 * 4


def test_a_context_ends_where_every_position_would_turn_otherwise() -> None:
    phi: dict[str, Any] = {**GEMMA_3, "model_type": "phi3", "max_position_embeddings": 131072}
    assert spec_of(phi).max_context == 131072
    assert spec_of(phi, rope_scaling={"type": "longrope"}).max_context == 4096
    long = {"rope_type": "longrope", "original_max_position_embeddings": 512}
    assert spec_of(phi, rope_parameters=long, original_max_position_embeddings=1024).max_context == 1024
    assert spec_of(GEMMA_3, rope_parameters=long).max_context == 256


def test_a_model_with_states_keeps_the_same_for_any_length_and_cannot_go_back() -> None:
    spec = ModelSpec.from_config({"model_type": "qwen3_5_text"}, "tiny")
    full, state = spec.cache_groups
    assert full.layers == tuple(range(3, 32, 4))
    assert (state.kind, state.layers) == ("recurrent", tuple(n for n in range(32) if n % 4 != 3))
    assert not spec.can_rewind
    one, many = (spec.kv_bytes(0, 3, length, "float32") for length in (1, 30_000))
    assert one == many == 3 * state.block_bytes(0, 1, 16, "float32")


@pytest.mark.parametrize(
    ("config", "changes", "expected"),
    [
        (GEMMA_3, {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        (GEMMA_3, {"sliding_window": None}, "no sliding_window"),
        (GEMMA_4, {"per_layer_config": {"9": {}}}, "per_layer_config = '9'"),
        (GEMMA_4, {"per_layer_config": {"1": {"intermediate_size": 4}}}, r"per_layer_config\.1"),
        (GEMMA_4, {"per_layer_config": 4}, "per_layer_config = 4"),
        (GEMMA_4, {"num_kv_shared_layers": 7}, "num_kv_shared_layers = 7"),
        (GEMMA_4, {"num_kv_shared_layers": 6, "layer_types": ["sliding_attention"] * 7}, "no layer before"),
        (GEMMA_4, {"enable_moe_block": True}, "no num_experts"),
        (GEMMA_3, {"model_type": "deepseek_v3"}, "num_key_value_heads = 2"),
        (QWEN_3_5, {"linear_num_value_heads": 3}, "linear_num_value_heads = 3"),
        (QWEN_3_5, {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim = 1"),
        (QWEN_3_5, {"layer_types": ["sliding_attention"] * 7}, "expected full_attention or linear_attention"),
        (GEMMA_3, {"model_type": "qwen3_moe", "mlp_only_layers": 3}, "mlp_only_layers = 3"),
        (GEMMA_3, {"model_type": "qwen3_moe", "num_experts": 0}, "num_experts = 0"),
    ],
)
def test_a_config_that_lies_is_refused_with_key_and_value(
    config: dict[str, Any], changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ModelError, match=expected):
        spec_of(config, **changes)
