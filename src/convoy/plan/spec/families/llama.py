"""Llama."""

from __future__ import annotations

from convoy.plan.spec.family import Family, GgufForm, LayerForm, MlxForm

# Synthetic models and the probe of a layer's speed are of this type.
LLAMA = "llama"
# GGUF has neighbouring dimensions turn together, where the library turns halves of a head.
GGUF_TURNED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}

ROWS = (
    Family(
        LLAMA,
        qkv_bias=None,
        out_bias=True,
        mlp_bias=True,
        divides_hidden=True,
        gguf=GgufForm(LLAMA, turned=GGUF_TURNED),
        plain_attention=True,
        plain_layers=True,
        mlx=MlxForm(),
        layer_form=LayerForm(),
    ),
)
