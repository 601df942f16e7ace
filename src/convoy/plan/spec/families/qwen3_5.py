"""Qwen3.5: gated delta nets, with gated attention in every fourth layer; with experts or without."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from convoy.plan.spec.config import ConfigReader
from convoy.plan.spec.families.qwen2 import GGUF_SHARED, GGUF_SHARED_GATE
from convoy.plan.spec.family import (
    GGUF_CHOICE,
    GGUF_EXPERTS,
    MAX_LAYERS,
    MAX_WIDTH,
    Family,
    GgufForm,
    GgufTensor,
    LayerHeads,
    MlxForm,
    Shape,
    Tensors,
)
from convoy.plan.spec.heads import FULL, alike_heads, kinds_of_layers
from convoy.plan.spec.tensors import attention, expert_stacks, gated, linear, num_experts

_LINEAR = "linear_attention"

_QWEN_3_5: dict[str, object] = {
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_QWEN_3_5_MOE = _QWEN_3_5 | {
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}


def _heads(reader: ConfigReader, family: Family, num_layers: int, hidden_size: int) -> tuple[LayerHeads, ...]:
    attending = alike_heads(reader, family, num_layers, hidden_size)
    delta = _delta_heads(reader)
    kinds = kinds_of_layers(reader, family, num_layers, (FULL, _LINEAR))
    return tuple(delta if kind == _LINEAR else own for kind, own in zip(kinds, attending, strict=True))


def _delta_heads(reader: ConfigReader) -> LayerHeads:
    """Return the heads of a gated delta net: one state of keys by values for each head of values."""
    num_keys = reader.count("linear_num_key_heads", most=MAX_WIDTH)
    num_values = reader.count("linear_num_value_heads", most=MAX_WIDTH)
    if num_values % num_keys:
        raise reader.wrong(
            "linear_num_value_heads", num_values, f"a multiple of linear_num_key_heads = {num_keys}"
        )
    key_dim = reader.count("linear_key_head_dim", most=MAX_WIDTH // num_keys)
    value_dim = reader.count("linear_value_head_dim", most=MAX_WIDTH // num_values)
    num_taps = reader.count("linear_conv_kernel_dim", most=MAX_LAYERS)
    if num_taps < 2:
        raise reader.wrong("linear_conv_kernel_dim", num_taps, "2 or more")
    return LayerHeads(num_values, num_keys, key_dim, value_dim, kind="recurrent", num_taps=num_taps)


def _attention(reader: ConfigReader, family: Family, heads: LayerHeads, hidden: int) -> Tensors:
    if heads.is_state:
        return _delta_net(heads, hidden)
    return attention(reader, family, heads, hidden)


def _delta_net(heads: LayerHeads, hidden: int) -> Tensors:
    value = heads.num_heads * heads.value_dim
    yield "linear_attn.dt_bias", (heads.num_heads,)
    yield "linear_attn.A_log", (heads.num_heads,)
    yield "linear_attn.conv1d.weight", (heads.mixed_width, 1, heads.num_taps)
    yield "linear_attn.norm.weight", (heads.value_dim,)
    yield from linear("linear_attn.out_proj", hidden, value)
    yield from linear("linear_attn.in_proj_qkv", heads.mixed_width, hidden)
    yield from linear("linear_attn.in_proj_z", value, hidden)
    yield from linear("linear_attn.in_proj_b", heads.num_heads, hidden)
    yield from linear("linear_attn.in_proj_a", heads.num_heads, hidden)


def _experts(reader: ConfigReader, family: Family, number: int, heads: LayerHeads, hidden: int) -> Tensors:  # noqa: ARG001 - one form for all
    count = num_experts(reader, "num_experts")
    yield from linear("mlp.gate", count, hidden)
    between = reader.count("moe_intermediate_size", most=MAX_WIDTH)
    yield from expert_stacks("mlp.experts", count, between, hidden)
    shared = reader.count("shared_expert_intermediate_size", most=MAX_WIDTH)
    yield from gated("mlp.shared_expert", shared, hidden)
    yield from linear("mlp.shared_expert_gate", 1, hidden)


def _read_gguf(reader: ConfigReader, shapes: Mapping[str, Shape]) -> dict[str, object]:  # noqa: ARG001 - one form for all
    """Return the heads of delta nets: the file has the width of all values, and not of one head."""
    inner, heads = (
        reader.count("ssm.inner_size", most=MAX_WIDTH),
        reader.count("ssm.time_step_rank", most=MAX_WIDTH),
    )
    if inner % heads:
        raise reader.wrong("ssm.inner_size", inner, f"a multiple of ssm.time_step_rank = {heads}")
    return {"linear_value_head_dim": inner // heads}


_GGUF = GgufForm(
    "qwen35",
    settings={
        "full_attention_interval": "full_attention_interval",
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "ssm.state_size": "linear_key_head_dim",
        "ssm.group_count": "linear_num_key_heads",
        "ssm.time_step_rank": "linear_num_value_heads",
    },
    read=_read_gguf,
    modules={
        "ffn_norm": "",
        "post_attention_norm": "post_attention_layernorm",
        "ssm_norm": "linear_attn.norm",
    },
    # llama.cpp has the heads of values in another order: the first of each key, then the second of each.
    made={
        "linear_attn.in_proj_qkv.weight": GgufTensor("values behind keys", ("attn_qkv.weight",)),
        "linear_attn.in_proj_z.weight": GgufTensor("value rows", ("attn_gate.weight",)),
        "linear_attn.in_proj_a.weight": GgufTensor("value heads", ("ssm_alpha.weight",)),
        "linear_attn.in_proj_b.weight": GgufTensor("value heads", ("ssm_beta.weight",)),
        "linear_attn.dt_bias": GgufTensor("value heads", ("ssm_dt.bias",)),
        "linear_attn.A_log": GgufTensor("decays", ("ssm_a",)),
        "linear_attn.conv1d.weight": GgufTensor("taps", ("ssm_conv1d.weight",)),
        "linear_attn.out_proj.weight": GgufTensor("value columns", ("ssm_out.weight",)),
    },
    norms_plus_one=True,
    plain_norms=frozenset({"ssm_norm"}),
    partial_rotation=True,
)
_GGUF_MOE = replace(
    _GGUF,
    architecture="qwen35moe",
    settings={
        **_GGUF.settings,
        **GGUF_CHOICE,
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    modules={**_GGUF.modules, **GGUF_SHARED},
    made={**_GGUF.made, **GGUF_EXPERTS, **GGUF_SHARED_GATE},
)

ROWS = tuple(
    Family(
        model_type,
        defaults,
        heads=_heads,
        attention=_attention,
        feed_forward=feed_forward,
        qkv_bias=None,
        out_bias=True,
        qk_norm=True,
        gated=True,
        recurrent=True,
        full_every=4,
        full_every_key="full_attention_interval",
        norm="one plus weight",
        plain_attention=True,
        router="softmax of all",
        replaced={"linear_attn": "convoy.model.layers.delta:GatedDeltaNet"},
        mlx=MlxForm(),
        gguf=gguf,
    )
    for model_type, defaults, feed_forward, gguf in (
        ("qwen3_5_text", _QWEN_3_5, None, _GGUF),
        ("qwen3_5_moe_text", _QWEN_3_5_MOE, _experts, _GGUF_MOE),
    )
)
