"""Look up embeddings by token id, with rows divided between ranks."""

from __future__ import annotations

import torch
from torch import nn

from convoy.model.kernels.stored.embedding import Embedding
from convoy.model.layers.layer_inputs import LayerInputs
from convoy.model.parallel.ranks import Ranks


class VocabularyPart(nn.Module):
    """Hold rows [rank * rows, (rank + 1) * rows) of the vocabulary. A lookup gives whole rows, in float32.

    One rank has a token's row and the others zeros, so the sum has the row's bits.
    """

    def __init__(self, table: Embedding, ranks: Ranks) -> None:
        super().__init__()
        self.table = table
        self._ranks = ranks

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map int64 [T] to [T, hidden_size]."""
        return self._ranks.add(self.own_rows(tokens))

    def own_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows, with zeros for tokens of other ranks."""
        count = self.table.num_embeddings
        own = tokens - self._ranks.shard.rank * count
        foreign = (own < 0) | (own >= count)
        rows: torch.Tensor = self.table(own.masked_fill(foreign, 0)).to(torch.float32)
        return rows.masked_fill_(foreign[:, None], 0.0)


class RankInputs(LayerInputs):
    """Make the layers' inputs from token ids, with tables of which each rank has some rows."""

    def __init__(self, inputs: LayerInputs, embedding: VocabularyPart, ranks: Ranks) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(inputs.__dict__)
        self.embedding = embedding
        tables = [table for table in inputs.tables.values() if isinstance(table, nn.Embedding)]
        self._parts = [VocabularyPart(table, ranks) for table in tables]
        self.tables = nn.ModuleDict(dict(zip(inputs.tables, self._parts, strict=True)))
        self._ranks = ranks

    def look_up(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """Return each layer's rows, summed over the ranks in one call."""
        own = [part.own_rows(tokens) for part in self._parts]
        whole = self._ranks.add(torch.cat(own, dim=-1))
        return list(torch.split(whole, [part.table.embedding_dim for part in self._parts], dim=-1))
