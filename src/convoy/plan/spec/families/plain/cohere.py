"""Cohere's Command R, and Cohere 2 with windows."""

from __future__ import annotations

from convoy.plan.spec.family import Family

ROWS = (
    Family(
        "cohere",
        {"tie_word_embeddings": True},
        counted=True,
        unshared="its norms have a weight for each head",
        norm=None,
    ),
    Family(
        "cohere2",
        {"tie_word_embeddings": True, "sliding_window": 4096},
        window="by layer type",
        full_every=4,
        full_every_key="sliding_window_pattern",
        counted=True,
        norm=None,
    ),
)
