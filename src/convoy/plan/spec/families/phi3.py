"""Phi-3 and Phi-4: one linear for q, k and v, and one for gate and up."""

from __future__ import annotations

from convoy.plan.spec.family import Family

ROWS = (
    Family(
        "phi3",
        {"original_max_position_embeddings": 4096},
        qkv="joined",
        mlp="joined",
        window="always",
        # The loader takes these three words for one.
        long_ropes=frozenset({"longrope", "su", "yarn"}),
        plain_attention=True,
    ),
)
