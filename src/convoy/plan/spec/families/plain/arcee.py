"""Arcee."""

from __future__ import annotations

from convoy.plan.spec.families.llama import GGUF_TURNED
from convoy.plan.spec.family import Family, GgufForm

ROWS = (
    Family(
        "arcee",
        counted=True,
        plain_attention=True,
        gguf=GgufForm("arcee", fixed={"hidden_act": "relu2"}, turned=GGUF_TURNED),
    ),
)
