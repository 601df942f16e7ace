"""OLMo 2 and 3, and OLMoE with experts."""

from __future__ import annotations

from convoy.plan.spec.family import Family

_NORMS = "its norms go over the queries of all heads at once"

ROWS = (
    Family("olmo2", counted=True, unshared=_NORMS),
    Family(
        "olmo3",
        {"sliding_window": 4096},
        window="by layer type",
        full_every=4,
        counted=True,
        unshared=_NORMS,
    ),
    Family(
        "olmoe",
        counted=True,
        unshared=_NORMS,
        expert_width_key="intermediate_size",
        router="softmax of all",
    ),
)
