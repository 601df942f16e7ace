"""GLM and GLM-4, with experts or without."""

from __future__ import annotations

from convoy.plan.spec.family import Family

ROWS = (
    Family("glm", {"head_dim": 128}, counted=True),
    Family("glm4", {"head_dim": 128}, counted=True),
    Family("glm4_moe", counted=True, shared_expert_alike=True, router="best groups"),
)
