"""ModelSpec against the families' own code, and against configurations that lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from convoy.errors import ModelError
from convoy.plan.spec.model import ModelSpec

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 105,
    "max_position_embeddings": 256,
}

VARIANTS = [
    ("Llama", {}),
    ("Llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    ("Llama", {"head_dim": 16, "tie_word_embeddings": True}),
    ("Mistral", {}),
    ("Mistral", {"head_dim": 12, "sliding_window": None}),
    ("Mistral", {"num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True}),
    ("Qwen2", {}),
    ("Qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}),
    ("Qwen3", {"attention_bias": True}),
    ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
]


def _saved(family: str, changes: dict[str, Any], path: Path) -> tuple[Any, dict[str, Any]]:
    arguments = {key: value for key, value in (LLAMA | changes).items() if key != "model_type"}
    config = getattr(transformers, f"{family}Config")(**arguments)
    config.save_pretrained(path)
    return config, json.loads((path / "config.json").read_text())


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_bytes_equal_those_of_the_instantiated_model(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    config, written = _saved(family, changes, tmp_path)
    spec = ModelSpec.from_config(written, "tiny")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    layers = [sum(p.numel() for p in layer.parameters()) * 4 for layer in model.model.layers]
    assert [spec.layer_bytes(i, "float32") for i in range(spec.num_layers)] == layers
    assert spec.embed_bytes("bfloat16") == model.model.embed_tokens.weight.numel() * 2
    # parameters() yields a tied matrix once
    whole = sum(p.numel() for p in model.parameters())
    assert spec.weight_bytes(0, 4, embed=True, output=True, dtype="float32") == whole * 4
    assert spec.tied_embeddings == config.tie_word_embeddings


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_attention_shapes_and_windows_equal_those_of_the_loader(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    config, written = _saved(family, changes, tmp_path)
    spec = ModelSpec.from_config(written, "tiny")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.weight.shape[0] == spec.num_heads * spec.head_dim
    assert attention.k_proj.weight.shape[0] == spec.num_kv_heads * spec.head_dim
    windows = {layer: group.window for group in spec.cache_groups for layer in group.layers}
    for index, layer in enumerate(model.model.layers):
        expected = getattr(layer.self_attn, "sliding_window", None)
        if family == "Mistral":
            expected = config.sliding_window
        assert windows[index] == expected


def test_a_missing_key_means_what_it_means_to_the_loader() -> None:
    for family in ("Llama", "Mistral", "Qwen2", "Qwen3"):
        config_class = getattr(transformers, f"{family}Config")
        written = {**LLAMA, "model_type": family.lower(), "num_attention_heads": 32, "hidden_size": 128}
        del written["num_key_value_heads"]
        config = config_class(**{key: value for key, value in written.items() if key != "model_type"})
        spec = ModelSpec.from_config(written, "tiny")
        assert spec.num_kv_heads == config.num_key_value_heads
        assert spec.head_dim == (config.head_dim if getattr(config, "head_dim", None) else 4)


def test_a_tied_matrix_counts_once_together_and_twice_apart() -> None:
    spec = ModelSpec.from_config({**LLAMA, "tie_word_embeddings": True}, "tiny")
    matrix, norm = 105 * 32 * 4, 32 * 4
    together = spec.weight_bytes(0, 0, embed=True, output=True, dtype="float32")
    apart = spec.weight_bytes(0, 0, embed=True, output=False, dtype="float32") + spec.weight_bytes(
        0, 0, embed=False, output=True, dtype="float32"
    )
    assert together == matrix + norm
    assert apart == 2 * matrix + norm


def test_kv_memory_follows_the_windows() -> None:
    config = {
        **LLAMA,
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 64,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    }
    spec = ModelSpec.from_config(config, "tiny")
    assert [(group.name, group.layers) for group in spec.cache_groups] == [
        ("full", (0, 2)),
        ("window-64", (1, 3)),
    ]
    per_layer = 2 * 2 * 8 * 4  # K and V, two heads of 8, float32
    assert spec.kv_token_bytes(0, 4, "float32") == 4 * per_layer
    assert spec.kv_bytes(0, 4, 1000, "float32") == 2 * per_layer * 1000 + 2 * per_layer * 64
    assert spec.kv_bytes(1, 2, 1000, "float32") == per_layer * 64


def test_a_nested_text_config_is_read_and_the_wrapper_fills_gaps() -> None:
    spec = ModelSpec.from_config(
        {"model_type": "wrapper", "tie_word_embeddings": True, "text_config": dict(LLAMA)}, "wrapped"
    )
    assert spec.family == "llama"
    assert spec.num_layers == 4
    assert spec.tied_embeddings


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("num_hidden_layers", -3, "num_hidden_layers = -3, expected a whole number from 1 to 1024"),
        ("num_hidden_layers", 10**9, "num_hidden_layers = 1000000000"),
        ("num_hidden_layers", 4.0, "num_hidden_layers = 4.0"),
        ("num_hidden_layers", True, "num_hidden_layers = True"),
        ("hidden_size", 0, "hidden_size = 0"),
        ("hidden_size", 30, "hidden_size = 30, expected a multiple of num_attention_heads = 4"),
        ("hidden_size", "32", "hidden_size = '32'"),
        ("num_key_value_heads", 3, "num_key_value_heads = 3, expected a divisor of num_attention_heads = 4"),
        ("head_dim", 7, "head_dim = 7, expected an even number"),
        ("vocab_size", 1 << 40, "vocab_size = 1099511627776"),
        ("tie_word_embeddings", "yes", "tie_word_embeddings = 'yes', expected true or false"),
        ("attention_bias", 1, "attention_bias = 1"),
        ("dtype", "int4", "dtype = 'int4', expected one of bfloat16, float16, float32"),
        ("text_config", 5, "text_config = 5, expected an object"),
        ("model_type", 5, "model_type = 5, expected a string"),
        ("partial_rotary_factor", 2, "partial_rotary_factor = 2, expected a number above 0 and at most 1"),
        ("rope_parameters", {"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5"),
        ("rope_scaling", {"full_attention": {"partial_rotary_factor": -1}}, "partial_rotary_factor = -1"),
        ("partial_rotary_factor", "all", "partial_rotary_factor = 'all'"),
        ("quantization_config", {"bits": 4}, "quantization_config"),
    ],
)
def test_a_config_that_lies_is_refused_with_key_and_value(key: str, value: object, expected: str) -> None:
    with pytest.raises(ModelError) as caught:
        ModelSpec.from_config({**LLAMA, key: value}, "liar")
    assert str(caught.value).startswith("liar: ")
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"]
)
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ModelError, match=f"config.json has no {key}"):
        ModelSpec.from_config({name: value for name, value in LLAMA.items() if name != key}, "liar")


@pytest.mark.parametrize(
    "layer_types",
    [["full_attention"], ["full_attention"] * 3 + ["linear_attention"], "full_attention", [1, 2, 3, 4]],
)
def test_layer_types_must_fit_the_layers(layer_types: object) -> None:
    with pytest.raises(ModelError, match="layer_types"):
        ModelSpec.from_config({**LLAMA, "model_type": "qwen3", "layer_types": layer_types}, "liar")


def test_an_unsupported_type_is_named_with_those_that_are_supported() -> None:
    with pytest.raises(ModelError, match="model type 'mamba' is not supported") as caught:
        ModelSpec.from_config({**LLAMA, "model_type": "mamba"}, "m")
    assert str(caught.value.hint).startswith("supported types: ")
    assert "llama, mistral" in str(caught.value.hint)
    assert str(caught.value).endswith("its layers keep recurrent state")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(
        st.sampled_from([*sorted(LLAMA), "head_dim", "layer_types", "text_config"]), JSON, max_size=4
    )
)
def test_any_json_gives_a_spec_or_a_model_error(changes: dict[str, Any]) -> None:
    try:
        spec = ModelSpec.from_config({**LLAMA, **changes}, "fuzzed")
    except ModelError:
        return
    assert spec.kv_token_bytes(0, spec.num_layers, "float32") > 0
