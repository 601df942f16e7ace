"""Cohere's Command R, and Cohere 2 with windows."""

from __future__ import annotations

from convoy.plan.spec.family import Family, LayerForm

_NORMS = ("input_layernorm", "", "", "")

ROWS = (
    Family(
        "cohere",
        {"tie_word_embeddings": True},
        counted=True,
        unshared="its norms have a weight for each head",
        norm=None,
        layer_form=LayerForm(_NORMS, mean_norms=True, parallel=True, rotation="pairs apart"),
    ),
    Family(
        "cohere2",
        {"tie_word_embeddings": True, "sliding_window": 4096},
        window="by layer type",
        full_every=4,
        full_every_key="sliding_window_pattern",
        counted=True,
        norm=None,
        layer_form=LayerForm(
            _NORMS, mean_norms=True, parallel=True, rotation="pairs apart", full_unturned=True
        ),
    ),
)
