"""OLMo 2 and 3, and OLMoE with experts."""

from __future__ import annotations

from convoy.plan.spec.family import Family, LayerForm

_NORMS = "its norms go over the queries of all heads at once"

_FORM = LayerForm(("", "post_attention_layernorm", "", "post_feedforward_layernorm"))

ROWS = (
    Family("olmo2", counted=True, unshared=_NORMS, layer_form=_FORM),
    Family(
        "olmo3",
        {"sliding_window": 4096},
        window="by layer type",
        full_every=4,
        counted=True,
        unshared=_NORMS,
        layer_form=_FORM,
    ),
    Family(
        "olmoe",
        counted=True,
        unshared=_NORMS,
        expert_width_key="intermediate_size",
        router="softmax of all",
        layer_form=LayerForm(),
    ),
)
