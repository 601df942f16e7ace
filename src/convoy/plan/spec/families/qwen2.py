"""Qwen2, and Qwen2-MoE with experts and a shared one behind a gate.

It is apart from Qwen3.5, which is another family. That one has the same shared expert, and takes the names of
its tensors in a GGUF file from here.
"""

from __future__ import annotations

from convoy.plan.spec.family import (
    GGUF_CHOICE,
    GGUF_EXPERTS,
    Family,
    GgufForm,
    GgufTensor,
    LayerForm,
    MlxForm,
)

_DEFAULTS: dict[str, object] = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
# The expert for all rows, and its gate.
GGUF_SHARED = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
GGUF_SHARED_GATE = {
    "mlp.shared_expert_gate.weight": GgufTensor("one row", ("ffn_gate_inp_shexp.weight",)),
}

ROWS = (
    Family(
        "qwen2",
        _DEFAULTS,
        qkv_bias=True,
        window="after a layer",
        gguf=GgufForm("qwen2"),
        plain_attention=True,
        plain_layers=True,
        mlx=MlxForm(),
        layer_form=LayerForm(),
    ),
    Family(
        "qwen2_moe",
        counted=True,
        refused_keys=("use_sliding_window",),
        router="softmax of all",
        layer_form=LayerForm(),
        gguf=GgufForm(
            "qwen2moe",
            settings={
                **GGUF_CHOICE,
                "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
            },
            # llama.cpp fixes this in its code.
            fixed={"norm_topk_prob": False},
            modules=GGUF_SHARED,
            made={**GGUF_EXPERTS, **GGUF_SHARED_GATE},
        ),
    ),
)
