"""Which tensors of a checkpoint a stage owns: what is read, hashed and fetched for it, and nothing else."""

from __future__ import annotations

from collections.abc import Collection

from convoy.model.checkpoints.checkpoint import StoredTensor
from convoy.model.checkpoints.source import ModelSource

# What layers that take token ids share, Gemma 4's per-layer embeddings
LAYER_INPUT_NAMES = (
    "model.embed_tokens_per_layer",
    "model.per_layer_model_projection",
    "model.per_layer_projection_norm",
)
_KV_PARTS = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")  # a checkpoint may have them and nobody use them


def owned_tensors(
    source: ModelSource, layers: Collection[int], *, embed: bool, output: bool
) -> list[StoredTensor]:
    """Those of ``layers``, and of embedding and output where owned, in the order of the checkpoint.

    Whoever owns the output of a model with tied embeddings needs the embedding's matrix too, and so does who
    has layers that look token ids up.
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


# DeepSeek V4's files have names of their own; those within a layer are the library's to understand
_OTHER_NAMES = {
    "embed.": "model.embed_tokens.",
    "head.": "lm_head.",
    "norm.": "model.norm.",
    "hc_head_": "model.hc_head.hc_",
    "layers.": "model.layers.",
}


def decoder_name(name: str) -> str:
    """The name that a tensor has in the decoder by itself, where it lies in a model of more than text."""
    for prefix, known in _OTHER_NAMES.items():
        if name.startswith(prefix):
            return known + name.removeprefix(prefix)
    for prefix in ("model.language_model.", "language_model.model."):
        if name.startswith(prefix):
            return f"model.{name.removeprefix(prefix)}"
    return name.removeprefix("language_model.") if name.startswith("language_model.lm_head.") else name
