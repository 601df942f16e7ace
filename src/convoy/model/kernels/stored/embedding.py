"""Look up embeddings in a matrix that keeps the form of its file."""

from __future__ import annotations

import torch
from torch import nn

from convoy.model.kernels.stored.linear import StoredLinear, exact_available
from convoy.model.kernels.stored.matrix import StoredMatrix
from convoy.model.kernels.stored.packed import is_packed_block
from convoy.model.kernels.stored.weights import own_memory


class StoredEmbedding(nn.Module):
    """Look up rows of a stored matrix [tokens, hidden_size]. Only the rows asked for are unpacked.

    It is used after `own_memory`, or after `share` with `lm_head`.
    """

    def __init__(self, matrix: StoredMatrix) -> None:
        """Store ``matrix``."""
        super().__init__()
        self.matrix: StoredMatrix | None = matrix
        self._row_values = matrix.row_values
        self.num_bytes = matrix.num_bytes
        self.num_embeddings, self.embedding_dim = matrix.shape

    def own_memory(self) -> None:
        """Copy the matrix, which may lie in a mapped file.

        Blocks of ggml are packed for compiled code: their package takes as long for the row of one token as
        many layers do.
        """
        matrix = self.matrix
        assert matrix is not None, "it is copied once"
        if all(map(is_packed_block, matrix.ranges)) and exact_available():
            linear = StoredLinear(matrix, None)
            self._row_values, self.num_bytes = linear.row_values, linear.weight_bytes
            # The mapped file is not needed any more.
            self.matrix = None
            return
        self.matrix = own_memory(matrix)
        self._row_values = self.matrix.row_values

    def share(self, linear: StoredLinear) -> None:
        """Look rows up in a linear over the same matrix, whose memory is then there once."""
        self._row_values = linear.row_values
        self.num_bytes = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map int64 [T] to float32 [T, hidden_size]."""
        return self._row_values(tokens)


Embedding = nn.Embedding | StoredEmbedding
