"""Gemma, Gemma 2 and Gemma 3: norms with one plus the weight."""

from __future__ import annotations

from convoy.plan.spec.family import Family

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

ROWS = (
    Family(
        "gemma",
        {"tie_word_embeddings": True, "head_dim": 256},
        counted=True,
        norm="one plus weight",
        plain_attention=True,
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
    ),
)
