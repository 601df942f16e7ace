"""Granite."""

from __future__ import annotations

from convoy.plan.spec.families.llama import GGUF_TURNED
from convoy.plan.spec.family import Family, GgufForm, LayerForm

_SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}

ROWS = (
    Family(
        "granite",
        counted=True,
        plain_attention=True,
        layer_form=LayerForm(),
        gguf=GgufForm("granite", settings=_SCALES, turned=GGUF_TURNED),
    ),
)
