"""Seed-OSS."""

from __future__ import annotations

from convoy.plan.spec.family import Family, GgufForm, LayerForm

ROWS = (
    Family(
        "seed_oss",
        {"num_key_value_heads": 8, "head_dim": 128},
        counted=True,
        plain_attention=True,
        layer_form=LayerForm(),
        gguf=GgufForm(
            "seed_oss", modules={"ffn_norm": "", "post_attention_norm": "post_attention_layernorm"}
        ),
    ),
)
