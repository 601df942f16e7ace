"""GPT-OSS: sinks, and experts with bounded gates in transposed stacks."""

from __future__ import annotations

from collections.abc import Mapping

from convoy.plan.spec.config import ConfigReader
from convoy.plan.spec.family import (
    MAX_WIDTH,
    Family,
    GgufForm,
    GgufTensor,
    LayerForm,
    LayerHeads,
    MlxForm,
    Shape,
    Tensors,
)
from convoy.plan.spec.heads import pattern_of_layers
from convoy.plan.spec.tensors import linear, num_experts

_DEFAULTS: dict[str, object] = {
    "num_hidden_layers": 36,
    "num_local_experts": 128,
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "max_position_embeddings": 131_072,
    "attention_bias": True,
}


def _feed_forward(
    reader: ConfigReader,
    family: Family,  # noqa: ARG001 - as the others'
    number: int,  # noqa: ARG001 - as the others'
    heads: LayerHeads,  # noqa: ARG001 - as the others'
    hidden: int,
) -> Tensors:
    count = num_experts(reader, "num_local_experts", "num_experts")
    between = reader.count("intermediate_size", most=MAX_WIDTH)
    yield from linear("mlp.router", count, hidden, bias=True)
    yield "mlp.experts.gate_up_proj", (count, hidden, 2 * between)
    yield "mlp.experts.gate_up_proj_bias", (count, 2 * between)
    yield "mlp.experts.down_proj", (count, between, hidden)
    yield "mlp.experts.down_proj_bias", (count, hidden)


def _read_gguf(reader: ConfigReader, shapes: Mapping[str, Shape]) -> dict[str, object]:  # noqa: ARG001 - one form for all
    return {"layer_types": pattern_of_layers(reader, period=2)}


_GGUF = GgufForm(
    "gpt-oss",
    settings={
        "attention.sliding_window": "sliding_window",
        "expert_feed_forward_length": "intermediate_size",
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
    },
    read=_read_gguf,
    modules={
        "ffn_norm": "",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
    },
    made={
        "self_attn.sinks": GgufTensor("as stored", ("attn_sinks.weight",)),
        "mlp.experts.gate_up_proj": GgufTensor(
            "alternating columns", ("ffn_gate_exps.weight", "ffn_up_exps.weight")
        ),
        "mlp.experts.gate_up_proj_bias": GgufTensor(
            "alternating", ("ffn_gate_exps.bias", "ffn_up_exps.bias")
        ),
        "mlp.experts.down_proj": GgufTensor("transposed", ("ffn_down_exps.weight",)),
        "mlp.experts.down_proj_bias": GgufTensor("as stored", ("ffn_down_exps.bias",)),
    },
    # The published models were trained with a ramp between fractions; llama.cpp rounds its ends.
    yarn={"truncate": False},
)

ROWS = (
    Family(
        "gpt_oss",
        _DEFAULTS,
        feed_forward=_feed_forward,
        qkv_bias=None,
        out_bias=True,
        sinks=True,
        window="by layer type",
        full_every=2,
        expert_width_key="intermediate_size",
        transposed_experts=True,
        plain_attention=True,
        router="softmax of chosen",
        expert_gate="clamped",
        layer_form=LayerForm(),
        mlx=MlxForm(),
        gguf=_GGUF,
    ),
)
