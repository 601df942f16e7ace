"""GLM and GLM-4, with experts or without."""

from __future__ import annotations

from convoy.plan.spec.family import Family, LayerForm

_NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")

ROWS = (
    Family("glm", {"head_dim": 128}, counted=True, layer_form=LayerForm(rotation="pairs")),
    Family("glm4", {"head_dim": 128}, counted=True, layer_form=LayerForm(_NORMS, rotation="pairs")),
    Family("glm4_moe", counted=True, shared_expert_alike=True, router="best groups", layer_form=LayerForm()),
)
