"""DeepSeek V3: attention over one latent a token, and experts chosen by groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from convoy.plan.spec.config import ConfigReader
from convoy.plan.spec.family import (
    GGUF_CHOICE,
    GGUF_EXPERTS,
    MAX_EXPERTS,
    MAX_WIDTH,
    Family,
    GgufForm,
    GgufTensor,
    LayerHeads,
    MlxForm,
    Shape,
    Tensors,
)
from convoy.plan.spec.heads import check_head_dim, read_windows
from convoy.plan.spec.tensors import expert_stacks, gated, linear, mlp, num_experts

_DEFAULTS: dict[str, object] = {
    "num_attention_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
}


def _heads(
    reader: ConfigReader,
    family: Family,
    num_layers: int,
    hidden_size: int,  # noqa: ARG001 - as the others'
) -> tuple[LayerHeads, ...]:
    """Return heads that share one latent a token, with the rotary part of its key."""
    num_heads = reader.count("num_attention_heads", most=MAX_WIDTH)
    num_kv_heads = reader.optional_count("num_key_value_heads", most=MAX_WIDTH) or num_heads
    if num_kv_heads != num_heads:
        raise reader.wrong("num_key_value_heads", num_kv_heads, f"num_attention_heads = {num_heads}")
    rotary = reader.count("qk_rope_head_dim", most=MAX_WIDTH)
    check_head_dim(reader, "qk_rope_head_dim", rotary, 1)
    latent = reader.count("kv_lora_rank", most=MAX_WIDTH)
    alike = LayerHeads(num_heads, 1, latent + rotary, latent, kind="latent")
    return tuple(replace(alike, window=window) for window in read_windows(reader, family, num_layers))


def _attention(reader: ConfigReader, family: Family, heads: LayerHeads, hidden: int) -> Tensors:  # noqa: ARG001 - one form for all
    bias = reader.flag("attention_bias")
    latent, rotary = heads.value_dim, heads.head_dim - heads.value_dim
    fixed = reader.count("qk_nope_head_dim", most=MAX_WIDTH)
    value = reader.count("v_head_dim", most=MAX_WIDTH)
    query = heads.num_heads * (fixed + rotary)
    rank = reader.optional_count("q_lora_rank", most=MAX_WIDTH)
    if rank is None:
        yield from linear("self_attn.q_proj", query, hidden)
    else:
        yield from linear("self_attn.q_a_proj", rank, hidden, bias=bias)
        yield "self_attn.q_a_layernorm.weight", (rank,)
        yield from linear("self_attn.q_b_proj", query, rank)
    yield from linear("self_attn.kv_a_proj_with_mqa", latent + rotary, hidden, bias=bias)
    yield "self_attn.kv_a_layernorm.weight", (latent,)
    yield from linear("self_attn.kv_b_proj", heads.num_heads * (fixed + value), latent)
    yield from linear("self_attn.o_proj", hidden, heads.num_heads * value, bias=bias)


def _feed_forward(
    reader: ConfigReader, family: Family, number: int, heads: LayerHeads, hidden: int
) -> Tensors:
    first = reader.get("first_k_dense_replace")
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise reader.wrong("first_k_dense_replace", first, "a whole number from 0")
    if number < first:
        yield from mlp(reader, family, number, heads, hidden)
        return
    count = num_experts(reader, "n_routed_experts", "num_local_experts")
    _check_groups(reader, count)
    between = reader.count("moe_intermediate_size", most=MAX_WIDTH)
    yield from linear("mlp.gate", count, hidden)
    yield "mlp.gate.e_score_correction_bias", (count,)
    yield from expert_stacks("mlp.experts", count, between, hidden)
    shared = between * reader.count("n_shared_experts", most=MAX_EXPERTS)
    yield from gated("mlp.shared_experts", shared, hidden)


def _check_groups(reader: ConfigReader, count: int) -> None:
    """Check that experts lie in groups of one size: a token chooses its best groups."""
    groups = reader.optional_count("n_group", most=MAX_EXPERTS)
    if groups is None:
        return
    if count % groups:
        raise reader.wrong("n_group", groups, f"a divisor of the {count} experts")
    reader.count("topk_group", most=groups, default=1)


# GGUF's number of a router that weighs experts by sigmoids. Without the setting it is a softmax.
_SIGMOID = 2


def _read_gguf(reader: ConfigReader, shapes: Mapping[str, Shape]) -> dict[str, object]:  # noqa: ARG001 - one form for all
    """Return the widths of heads, and the experts' choice. Raises ModelError for a DeepSeek V2."""
    gating = reader.get("expert_gating_func")
    if gating != _SIGMOID:
        raise reader.wrong("expert_gating_func", gating, f"{_SIGMOID}: DeepSeek V2 does not run")
    scaling = reader.word("rope.scaling.type") or "none"
    if scaling == "yarn" and reader.get("rope.scaling.yarn_log_multiplier") is None:
        raise reader.wrong("rope.scaling.yarn_log_multiplier", None, "a number above 0")
    rotary = reader.count("rope.dimension_count", most=MAX_WIDTH)
    # Older files count the widths of whole heads under the keys of every family.
    both = reader.optional_count("attention.key_length_mla", most=MAX_WIDTH)
    value = reader.optional_count("attention.value_length_mla", most=MAX_WIDTH)
    both = both or reader.count("attention.key_length", most=MAX_WIDTH)
    if both <= rotary:
        raise reader.wrong("attention.key_length_mla", both, f"more than rope.dimension_count = {rotary}")
    heads = reader.count("attention.head_count", most=MAX_WIDTH)
    return {
        "num_key_value_heads": heads,
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": both - rotary,
        "head_dim": rotary,
        "v_head_dim": value or reader.count("attention.value_length", most=MAX_WIDTH),
        "q_lora_rank": reader.optional_count("attention.q_lora_rank", most=MAX_WIDTH),
        "norm_topk_prob": reader.flag("expert_weights_norm"),
        "n_group": reader.count("expert_group_count", most=MAX_EXPERTS),
        "topk_group": reader.count("expert_group_used_count", most=MAX_EXPERTS),
    }


_GGUF = GgufForm(
    "deepseek2",
    settings={
        **GGUF_CHOICE,
        "expert_count": "n_routed_experts",
        "expert_shared_count": "n_shared_experts",
        "expert_weights_scale": "routed_scaling_factor",
        "leading_dense_block_count": "first_k_dense_replace",
        "attention.kv_lora_rank": "kv_lora_rank",
    },
    fixed={"rope_interleave": True},
    read=_read_gguf,
    modules={
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
    },
    made={
        **GGUF_EXPERTS,
        # llama.cpp multiplies queries with keys' part of this matrix, so it is stored transposed.
        "self_attn.kv_b_proj.weight": GgufTensor("latents", ("attn_k_b.weight", "attn_v_b.weight")),
        "mlp.gate.e_score_correction_bias": GgufTensor("as stored", ("exp_probs_b.bias",)),
    },
    partial_rotation=True,
)

ROWS = (
    Family(
        "deepseek_v3",
        _DEFAULTS,
        heads=_heads,
        attention=_attention,
        feed_forward=_feed_forward,
        shared_expert_alike=True,
        router="best groups",
        replaced={"self_attn": "convoy.model.layers.latent:LatentAttention"},
        mlx=MlxForm(),
        gguf=_GGUF,
    ),
)
