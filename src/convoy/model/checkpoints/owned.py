"""Select the tensors of a checkpoint that a stage owns; only these are read, hashed and fetched for it."""

from __future__ import annotations

from collections.abc import Collection

from convoy.model.checkpoints.checkpoint import StoredTensor
from convoy.model.checkpoints.names import decoder_name
from convoy.model.checkpoints.source import ModelSource

# modules that all layers with token ids as input share: Gemma 4's per-layer embeddings
LAYER_INPUT_NAMES = (
    "model.embed_tokens_per_layer",
    "model.per_layer_model_projection",
    "model.per_layer_projection_norm",
)
# a layer that reuses another layer's K/V may store these tensors all the same, and they stay unused
_KV_PARTS = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")


def owned_tensors(
    source: ModelSource, layers: Collection[int], *, embed: bool, output: bool
) -> list[StoredTensor]:
    """Return the tensors of ``layers``, and of embedding and output where owned, in the checkpoint's order.

    The stage that owns the output of a model with tied embeddings also needs the embedding's matrix. So does
    a stage with layers that look token ids up.
    """
    spec = source.spec
    prefixes = [f"model.layers.{layer}." for layer in layers]
    looks_up = spec.layer_input_size > 0 and not spec.token_id_layers.isdisjoint(layers)
    if embed or looks_up or (output and spec.tied_embeddings):
        prefixes.append("model.embed_tokens.")
    if looks_up:
        prefixes += [f"{name}." for name in LAYER_INPUT_NAMES]
    if output:
        prefixes += ["model.norm.", "model.hc_head."]
        if not spec.tied_embeddings:
            prefixes.append("lm_head.")
    unused = tuple(
        f"model.layers.{layer}.self_attn.{part}" for layer in spec.kv_sources for part in _KV_PARTS
    )
    owned = tuple(prefixes)
    return [
        tensor
        for name, tensor in source.tensors.items()
        if (known := decoder_name(name)).startswith(owned)
        and not (unused and known.startswith(unused))
        and name not in source.layout.unused
    ]
