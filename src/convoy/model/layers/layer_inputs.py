"""Make an input for each layer from token ids: the per-layer embeddings of Gemma 4's E-models.

Each layer has its own table and projection, so its values do not depend on the other layers of a stage.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from convoy.model.kernels.stored.embedding import Embedding
from convoy.model.kernels.stored.linear import float_linear


class LayerInputs(nn.Module):
    """Compute (norm(projection(embedded)) + table[token]) / sqrt(2), for every layer of a stage."""

    def __init__(
        self,
        embedding: Embedding,
        embed_scale: float,
        norm: nn.Module,
        tables: Mapping[int, torch.Tensor],
        projections: Mapping[int, torch.Tensor],
        *,
        packed: bool,
    ) -> None:
        super().__init__()
        # that of all ranks, where several share the stage
        self.embedding: nn.Module = embedding
        self.norm = norm
        self._embed_scale = embed_scale
        self.layers = tuple(tables)
        self.tables = nn.ModuleDict({str(layer): _lookup(table) for layer, table in tables.items()})
        self.projections = nn.ModuleDict(
            {str(layer): _linear(weight, packed=packed) for layer, weight in projections.items()}
        )

    def forward(self, tokens: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return [1, T, width] for each layer, from int64 [T] with at least two tokens."""
        embedded = self.embedding(tokens).to(torch.float32) * self._embed_scale
        found = {}
        for layer, rows in zip(self.layers, self.look_up(tokens), strict=True):
            projection = self.projections[str(layer)]
            projected = self.norm(projection(embedded) * embedded.shape[-1] ** -0.5)
            found[layer] = ((projected + rows * rows.shape[-1] ** 0.5) * 2.0**-0.5)[None]
        return found

    def look_up(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """Return each layer's rows of its table, [T, width], in float32."""
        return [self.tables[str(layer)](tokens).to(torch.float32) for layer in self.layers]


def _lookup(table: torch.Tensor) -> nn.Embedding:
    module: nn.Embedding = nn.Embedding.from_pretrained(table.detach())  # type: ignore[no-untyped-call]
    return module


def _linear(weight: torch.Tensor, *, packed: bool) -> nn.Module:
    if packed:
        return float_linear(weight, None)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach().to(torch.float32).contiguous(), requires_grad=False)
    return linear


def takes_shared_kv(layers: Iterable[nn.Module]) -> bool:
    """Return whether the layers of a step pass K and V on in a dictionary that the caller supplies.

    Some releases of the library (5.17) require it for every layer of such a family, read or not.
    """
    return any("shared_kv_states" in inspect.signature(type(layer).forward).parameters for layer in layers)
