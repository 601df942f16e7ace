"""Phi-3 and Phi-4: one linear for q, k and v, and one for gate and up."""

from __future__ import annotations

from collections.abc import Mapping

from convoy.plan.spec.config import ConfigReader
from convoy.plan.spec.family import MAX_CONTEXT, Family, GgufForm, LayerForm, Shape


def _read_gguf(reader: ConfigReader, shapes: Mapping[str, Shape]) -> dict[str, object]:  # noqa: ARG001 - one form for all
    """Return the window: the file has 0 for none."""
    window = reader.get("attention.sliding_window")
    return {
        "sliding_window": None
        if window in (None, 0)
        else reader.count("attention.sliding_window", most=MAX_CONTEXT)
    }


ROWS = (
    Family(
        "phi3",
        {"original_max_position_embeddings": 4096},
        qkv="joined",
        mlp="joined",
        window="always",
        # The loader takes these three words for one.
        long_ropes=frozenset({"longrope", "su", "yarn"}),
        plain_attention=True,
        layer_form=LayerForm(),
        gguf=GgufForm(
            "phi3",
            settings={"rope.scaling.original_context_length": "original_max_position_embeddings"},
            read=_read_gguf,
            modules={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
            partial_rotation=True,
        ),
    ),
)
