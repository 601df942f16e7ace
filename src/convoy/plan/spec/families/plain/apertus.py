"""Apertus."""

from __future__ import annotations

from convoy.plan.spec.family import Family, LayerForm

ROWS = (
    Family(
        "apertus",
        counted=True,
        layer_form=LayerForm(("attention_layernorm", "", "feedforward_layernorm", "")),
    ),
)
