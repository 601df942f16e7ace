"""Ernie 4.5."""

from __future__ import annotations

from convoy.plan.spec.family import Family, LayerForm

ROWS = (
    Family(
        "ernie4_5",
        {"tie_word_embeddings": True, "head_dim": 128},
        counted=True,
        layer_form=LayerForm(rotation="pairs"),
    ),
)
