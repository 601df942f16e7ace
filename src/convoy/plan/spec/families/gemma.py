"""Gemma, Gemma 2 and Gemma 3: norms with one plus the weight."""

from __future__ import annotations

from collections.abc import Mapping

from convoy.plan.spec.config import ConfigReader
from convoy.plan.spec.family import (
    FOUR_NORMS,
    MAX_LAYERS,
    MAX_WIDTH,
    Family,
    GgufForm,
    LayerForm,
    MlxForm,
    Shape,
)
from convoy.plan.spec.heads import pattern_of_layers

_GEMMA: dict[str, object] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
}
_GEMMA_2 = _GEMMA | {
    "vocab_size": 256_000,
    "num_hidden_layers": 26,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
}
_GEMMA_3 = _GEMMA_2 | {"vocab_size": 262_208, "max_position_embeddings": 131_072}
# Gemma has the first key, and its successors have the second.
GGUF_GELU = dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh")
# The norms around attention and MLP.
GGUF_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GGUF_CAPS = {
    "attention.sliding_window": "sliding_window",
    "final_logit_softcapping": "final_logit_softcapping",
}


def _query_scale(reader: ConfigReader, *, largest: int) -> int:
    """Return the number whose root divides a query.

    No file has it. The largest model of a family, which llama.cpp knows by its number of layers, takes the
    hidden width of a head, and the others the width of a head.
    """
    if reader.count("block_count", most=MAX_LAYERS) != largest:
        return reader.count("attention.key_length", most=MAX_WIDTH)
    return reader.count("embedding_length", most=MAX_WIDTH) // reader.count(
        "attention.head_count", most=MAX_WIDTH
    )


def _read_gguf_2(reader: ConfigReader, shapes: Mapping[str, Shape]) -> dict[str, object]:  # noqa: ARG001 - one form for all
    return {
        "query_pre_attn_scalar": _query_scale(reader, largest=46),
        "layer_types": pattern_of_layers(reader, period=2),
    }


def _read_gguf_3(reader: ConfigReader, shapes: Mapping[str, Shape]) -> dict[str, object]:  # noqa: ARG001 - one form for all
    """Return the scale of queries, the windows, and the rotations: only full layers have a scaled one."""
    full = {"rope_type": "default", "rope_theta": reader.optional_above_0("rope.freq_base") or 1e6}
    kind = reader.word("rope.scaling.type") or "none"
    if kind == "linear":
        full |= {"rope_type": kind, "factor": reader.optional_above_0("rope.scaling.factor")}
    elif kind != "none":
        raise reader.wrong("rope.scaling.type", kind, "none or linear")
    local = reader.optional_above_0("rope.freq_base_swa") or 1e4
    return {
        "query_pre_attn_scalar": _query_scale(reader, largest=62),
        "layer_types": pattern_of_layers(reader, period=6),
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


ROWS = (
    Family(
        "gemma",
        {"tie_word_embeddings": True, "head_dim": 256},
        counted=True,
        norm="one plus weight",
        plain_attention=True,
        layer_form=LayerForm(),
        mlx=MlxForm(scaled_embeddings=True),
        gguf=GgufForm("gemma", fixed=GGUF_GELU, norms_plus_one=True),
    ),
    Family(
        "gemma2",
        _GEMMA_2,
        qkv_bias=None,
        out_bias=True,
        window="by layer type",
        full_every=2,
        num_norms=4,
        divides_hidden=True,
        refused_keys=("use_bidirectional_attention",),
        norm="one plus weight",
        layer_form=LayerForm(FOUR_NORMS),
        gguf=GgufForm(
            "gemma2",
            settings={**GGUF_CAPS, "attn_logit_softcapping": "attn_logit_softcapping"},
            fixed=GGUF_GELU,
            read=_read_gguf_2,
            modules=GGUF_NORMS,
            norms_plus_one=True,
        ),
    ),
    Family(
        "gemma3_text",
        _GEMMA_3,
        qkv_bias=None,
        out_bias=True,
        qk_norm=True,
        window="by layer type",
        full_every=6,
        full_every_key="sliding_window_pattern",
        num_norms=4,
        divides_hidden=True,
        refused_keys=("use_bidirectional_attention",),
        norm="one plus weight",
        plain_attention=True,
        layer_form=LayerForm(FOUR_NORMS),
        mlx=MlxForm(scaled_embeddings=True, query_scale_key="query_pre_attn_scalar"),
        gguf=GgufForm(
            "gemma3",
            settings=GGUF_CAPS,
            fixed=GGUF_GELU,
            read=_read_gguf_3,
            modules=GGUF_NORMS,
            norms_plus_one=True,
            own_rotation=True,
        ),
    ),
)
