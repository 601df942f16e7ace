"""Qwen2, and Qwen2-MoE with experts and a shared one behind a gate."""

from __future__ import annotations

from convoy.plan.spec.family import Family

_DEFAULTS: dict[str, object] = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}

ROWS = (
    Family(
        "qwen2",
        _DEFAULTS,
        qkv_bias=True,
        window="after a layer",
        gguf=True,
        plain_attention=True,
        plain_layers=True,
    ),
    Family("qwen2_moe", counted=True, refused_keys=("use_sliding_window",), router="softmax of all"),
)
