"""Mistral, and Mixtral with experts."""

from __future__ import annotations

from convoy.plan.spec.family import Family

ROWS = (
    Family(
        "mistral",
        {"sliding_window": 4096, "num_key_value_heads": 8},
        window="always",
        plain_attention=True,
        plain_layers=True,
    ),
    Family(
        "mixtral",
        {"num_key_value_heads": 8},
        window="always",
        counted=True,
        expert_width_key="intermediate_size",
        plain_attention=True,
        router="softmax of all",
    ),
)
