"""Arcee."""

from __future__ import annotations

from convoy.plan.spec.families.llama import GGUF_TURNED
from convoy.plan.spec.family import Family, GgufForm, LayerForm

ROWS = (
    Family(
        "arcee",
        counted=True,
        plain_attention=True,
        layer_form=LayerForm(),
        gguf=GgufForm("arcee", fixed={"hidden_act": "relu2"}, turned=GGUF_TURNED),
    ),
)
