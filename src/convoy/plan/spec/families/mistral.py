"""Mistral, and Mixtral with experts."""

from __future__ import annotations

from convoy.plan.spec.families.llama import GGUF_TURNED, LLAMA
from convoy.plan.spec.family import GGUF_EXPERTS, Family, GgufForm, LayerForm, MlxForm

ROWS = (
    Family(
        "mistral",
        {"sliding_window": 4096, "num_key_value_heads": 8},
        window="always",
        plain_attention=True,
        plain_layers=True,
        mlx=MlxForm(),
        layer_form=LayerForm(),
    ),
    Family(
        "mixtral",
        {"num_key_value_heads": 8},
        window="always",
        counted=True,
        expert_width_key="intermediate_size",
        plain_attention=True,
        router="softmax of all",
        layer_form=LayerForm(),
        # llama.cpp has no architecture of its own for it; files of Mistral are files of Llama.
        gguf=GgufForm(
            LLAMA,
            experts=True,
            settings={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
            modules={"ffn_gate_inp": "mlp.gate"},
            made=GGUF_EXPERTS,
            turned=GGUF_TURNED,
        ),
    ),
)
