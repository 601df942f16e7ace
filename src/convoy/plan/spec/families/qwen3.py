"""Qwen3, and Qwen3-MoE with experts in some layers."""

from __future__ import annotations

from convoy.plan.spec.config import ConfigReader
from convoy.plan.spec.family import (
    GGUF_CHOICE,
    GGUF_EXPERTS,
    MAX_LAYERS,
    MAX_WIDTH,
    Family,
    GgufForm,
    LayerForm,
    LayerHeads,
    MlxForm,
    Tensors,
)
from convoy.plan.spec.tensors import expert_stacks, linear, mlp, num_experts


def _feed_forward(
    reader: ConfigReader, family: Family, number: int, heads: LayerHeads, hidden: int
) -> Tensors:
    dense = reader.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple):
        raise reader.wrong("mlp_only_layers", dense, "a list of layers")
    step = reader.count("decoder_sparse_step", most=MAX_LAYERS)
    if number in dense or (number + 1) % step:
        yield from mlp(reader, family, number, heads, hidden)
        return
    count = num_experts(reader, "num_experts", "num_local_experts")
    yield from linear("mlp.gate", count, hidden)
    between = reader.count("moe_intermediate_size", most=MAX_WIDTH)
    yield from expert_stacks("mlp.experts", count, between, hidden)


ROWS = (
    Family(
        "qwen3",
        {
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "head_dim": 128,
        },
        qkv_bias=None,
        out_bias=True,
        qk_norm=True,
        window="after a layer",
        gguf=GgufForm("qwen3"),
        plain_attention=True,
        plain_layers=True,
        mlx=MlxForm(),
        layer_form=LayerForm(),
    ),
    Family(
        "qwen3_moe",
        {
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "num_experts": 128,
            "moe_intermediate_size": 768,
            "decoder_sparse_step": 1,
        },
        feed_forward=_feed_forward,
        qkv_bias=None,
        out_bias=True,
        qk_norm=True,
        window="if used",
        plain_attention=True,
        mlx=MlxForm(),
        router="softmax of all",
        layer_form=LayerForm(),
        gguf=GgufForm(
            "qwen3moe",
            settings=GGUF_CHOICE,
            # llama.cpp fixes this in its code.
            fixed={"norm_topk_prob": True},
            modules={"ffn_gate_inp": "mlp.gate"},
            made=GGUF_EXPERTS,
        ),
    ),
)
