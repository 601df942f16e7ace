"""SmolLM 3."""

from __future__ import annotations

from convoy.plan.spec.families.llama import GGUF_TURNED
from convoy.plan.spec.family import Family, GgufForm, LayerForm

ROWS = (
    Family(
        "smollm3",
        {"tie_word_embeddings": True, "num_key_value_heads": 4},
        counted=True,
        refused_keys=("use_sliding_window",),
        layer_form=LayerForm(),
        gguf=GgufForm("smollm3", turned=GGUF_TURNED),
    ),
)
