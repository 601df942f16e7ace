"""Wrap modules made of a rank's slices, so that sums and embeddings are joined with the other ranks'.

It is apart from `loading.load` because that module knows nothing of sums between ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from convoy.errors import ModelError
from convoy.model.kernels.stored.embedding import StoredEmbedding
from convoy.model.layers.experts import ExactExperts, is_experts
from convoy.model.parallel.experts import OwnExperts
from convoy.model.parallel.ranks import PartialSum, Ranks
from convoy.model.parallel.vocabulary import RankInputs, VocabularyPart

if TYPE_CHECKING:
    from convoy.model.loading.loaded import LoadedModules

# linears with inputs split over the ranks, in the library's layers and in Convoy's
_LAST = {"o_proj", "out", "down_proj", "down"}


def join_parts(modules: LoadedModules, ranks: Ranks) -> None:
    """Wrap freshly loaded layers so that their sums, and embedding rows, cover all ranks; store ``ranks``.

    Raises ModelError for a layer without two sums to join, one of attention and one of the MLP.
    """
    for number, layer in modules.layers.items():
        if _join_layer(layer, ranks) < 2:
            raise ModelError(f"layer {number} has no attention and MLP with sums that ranks could join")
    embedding = modules.embedding
    if embedding is not None and not isinstance(embedding, VocabularyPart):
        embedding = modules.embedding = VocabularyPart(embedding, ranks)
    inputs = modules.layer_inputs
    if inputs is not None:
        if embedding is None:
            assert isinstance(inputs.embedding, nn.Embedding | StoredEmbedding), "freshly loaded"
            embedding = VocabularyPart(inputs.embedding, ranks)
        modules.layer_inputs = RankInputs(inputs, embedding, ranks)
    modules.ranks = ranks


def _join_layer(layer: nn.Module, ranks: Ranks) -> int:
    """Wrap a layer's partial sums and return their number."""
    joined: list[str] = []
    for name, part in list(layer.named_modules()):
        if any(name.startswith(f"{above}.") for above in joined):
            # an expert's result is already part of a joined sum
            continue
        if is_experts(part) or isinstance(part, ExactExperts):
            layer.set_submodule(name, PartialSum(_own(part, ranks), ranks))
        elif name.rpartition(".")[2] in _LAST:
            layer.set_submodule(name, PartialSum(part, ranks))
        else:
            continue
        joined.append(name)
    return len(joined)


def _own(experts: Any, ranks: Ranks) -> nn.Module:
    if ranks.shard.experts == "split":
        return experts  # type: ignore[no-any-return]
    count = len(experts.experts) if isinstance(experts, ExactExperts) else experts.num_experts
    return OwnExperts(experts, ranks.shard.rank * count, count)
