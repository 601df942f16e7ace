"""GPT-OSS: sinks, and experts with bounded gates in transposed stacks."""

from __future__ import annotations

from convoy.plan.spec.config import ConfigReader
from convoy.plan.spec.family import MAX_WIDTH, Family, LayerHeads, Tensors
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
    ),
)
