"""Which tensors of a checkpoint a stage owns: what is read, hashed and fetched for it, and nothing else."""

from __future__ import annotations

from collections.abc import Collection

from convoy.model.checkpoint import StoredTensor
from convoy.model.source import ModelSource


def owned_tensors(
    source: ModelSource, layers: Collection[int], *, embed: bool, output: bool
) -> list[StoredTensor]:
    """Those of ``layers``, and of embedding and output where owned, in the order of the checkpoint.

    Whoever owns the output of a model with tied embeddings needs the embedding's matrix too.
    """
    prefixes = [f"model.layers.{layer}." for layer in layers]
    tied = source.spec.tied_embeddings
    if embed or (output and tied):
        prefixes.append("model.embed_tokens.")
    if output:
        prefixes.append("model.norm.")
        if not tied:
            prefixes.append("lm_head.")
    owned = tuple(prefixes)
    return [tensor for name, tensor in source.tensors.items() if name.startswith(owned)]
