"""Run the layers of a stage on a device: the order of the kernels.

There are two paths. A lone row takes the linears of `kernels.single_row`, which fuse the norm, the gate and
the residual sum. Several rows take matrix products (`kernels.linears`), with `kernels.pointwise` between
them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from convoy.model.backends.cuda.batch import DeviceBatch
from convoy.model.backends.cuda.kernels.attention import attend
from convoy.model.backends.cuda.kernels.float8 import RoundedRows
from convoy.model.backends.cuda.kernels.forms import Matrix
from convoy.model.backends.cuda.kernels.linears import multiply, multiply_in_parts, rounds_rows
from convoy.model.backends.cuda.kernels.pointwise import (
    Rotation,
    add_norm,
    add_norm_rounded,
    gate,
    gate_rounded,
    rotate_and_store,
)
from convoy.model.backends.cuda.kernels.single_row import lone_linear
from convoy.model.backends.cuda.kernels.sums import DeviceSums
from convoy.model.backends.cuda.memory.pools import LayerPool
from convoy.model.backends.cuda.memory.weights import DeviceLayerWeights, StageWeights


class LlamaLayer(nn.Module):
    """Run one layer. The MLP's output is left to the next norm, which adds and normalises in one pass."""

    def __init__(self, own: DeviceLayerWeights, rotation: Rotation, eps: float) -> None:
        super().__init__()
        self._own = own
        self._rotation = rotation
        self._eps = eps
        # Set only where several ranks share the layer.
        self.sums: DeviceSums | None = None

    def forward(
        self, x: torch.Tensor, delta: torch.Tensor | None, pool: LayerPool, batch: DeviceBatch
    ) -> torch.Tensor | None:
        """Add ``delta`` and the attention's output to ``x`` [T, hidden_size], and return the MLP's output.

        For a lone row, and for ranks, ``x`` gets everything and the result is None.
        """
        own, eps = self._own, self._eps
        if self.sums is not None:
            self._share(x, pool, batch, self.sums)
            return None
        if x.shape[0] == 1:
            qkv = lone_linear(x, own.qkv, bias=own.qkv_bias, norm=own.input_norm, eps=eps)
            lone_linear(self._attend(qkv, pool, batch), own.out, bias=own.out_bias, out=x, adds=True)
            between = lone_linear(
                x, own.gate_up, bias=own.gate_up_bias, norm=own.middle_norm, eps=eps, gated=True
            )
            lone_linear(between, own.down, bias=own.down_bias, out=x, adds=True)
            return None
        qkv = multiply(self._normed(x, delta, own.input_norm, own.qkv), own.qkv, own.qkv_bias)
        delta = multiply(self._attend(qkv, pool, batch), own.out, own.out_bias)
        both = multiply(self._normed(x, delta, own.middle_norm, own.gate_up), own.gate_up, own.gate_up_bias)
        return multiply(self._gated(both), own.down, own.down_bias)

    def _normed(
        self, x: torch.Tensor, delta: torch.Tensor | None, norm: torch.Tensor, weight: Matrix
    ) -> torch.Tensor | RoundedRows:
        """Add ``delta`` to ``x``, and return the norm for products with ``weight``."""
        makes = add_norm_rounded if rounds_rows(weight) else add_norm
        return makes(x, delta, norm, self._eps)

    def _gated(self, both: torch.Tensor) -> torch.Tensor | RoundedRows:
        """Return the gated rows of the MLP for products with its last matrix."""
        return gate_rounded(both) if rounds_rows(self._own.down) else gate(both)

    def _share(self, x: torch.Tensor, pool: LayerPool, batch: DeviceBatch, sums: DeviceSums) -> None:
        """Run the layer on this rank's slices.

        The parts of all ranks are summed with the residual and rounded once.
        """
        own, eps = self._own, self._eps
        if x.shape[0] == 1:
            # Parts stay float32 until the sum, so the residual is rounded to bfloat16 once and not once a
            # rank.
            part = torch.float32
            qkv = lone_linear(x, own.qkv, bias=own.qkv_bias, norm=own.input_norm, eps=eps)
            whole = self._attend(qkv, pool, batch)
            sums.add(lone_linear(whole, own.out, bias=own.out_bias, dtype=part), x, adds=True)
            between = lone_linear(
                x, own.gate_up, bias=own.gate_up_bias, norm=own.middle_norm, eps=eps, gated=True
            )
            sums.add(lone_linear(between, own.down, bias=own.down_bias, dtype=part), x, adds=True)
            return
        qkv = multiply(self._normed(x, None, own.input_norm, own.qkv), own.qkv, own.qkv_bias)
        sums.add(multiply(self._attend(qkv, pool, batch), own.out, own.out_bias), x, adds=True)
        both = multiply(self._normed(x, None, own.middle_norm, own.gate_up), own.gate_up, own.gate_up_bias)
        sums.add(multiply(self._gated(both), own.down, own.down_bias), x, adds=True)

    def _attend(self, qkv: torch.Tensor, pool: LayerPool, batch: DeviceBatch) -> torch.Tensor:
        group = batch.groups[pool.group]
        rotate_and_store(
            *(qkv, pool.pool, pool.shape, self._rotation),
            positions=batch.positions,
            slots=group.slots,
            norms=self._own.head_norms,
            eps=self._eps,
        )
        return attend(
            qkv, pool.pool, pool.shape, tables=batch.tables, rows=group.rows, launches=group.launches
        )


class DeviceDecoder:
    """Run layers of a Llama's shape over the weights of `memory.weights`."""

    can_capture = True
    # Token ids are needed by the embedding only.
    takes_tokens = False

    def __init__(self, weights: StageWeights, rotation: Rotation) -> None:
        self.weights = weights
        self.layers = {
            number: LlamaLayer(own, rotation, weights.eps) for number, own in weights.layers.items()
        }
        self._sums: DeviceSums | None = None

    def join(self, sums: DeviceSums) -> None:
        """Declare that the weights are slices, and connect them to the other ranks through ``sums``."""
        self._sums = sums
        for layer in self.layers.values():
            layer.sums = sums

    @property
    def weight_bytes(self) -> int:
        return self.weights.weight_bytes

    @property
    def bytes_read(self) -> int:
        return self.weights.bytes_read

    @property
    def owns_output(self) -> bool:
        return self.weights.head is not None

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [T, hidden_size] of int32 token ids [T]."""
        assert self.weights.embedding is not None
        rows, sums = self.weights.embedding, self._sums
        if sums is None:
            return rows.index_select(0, ids)
        own = ids - sums.rank * rows.shape[0]
        foreign = (own < 0) | (own >= rows.shape[0])
        found = rows.index_select(0, own.masked_fill(foreign, 0))
        # Exactly one rank holds a token's row; the others contribute zeros, so the sum is exact.
        return sums.all_reduce(found.masked_fill_(foreign[:, None], 0.0))

    def run(
        self,
        x: torch.Tensor,
        ids: torch.Tensor | None,  # noqa: ARG002 - of others
        batch: DeviceBatch,
        pools: Mapping[int, LayerPool],
    ) -> torch.Tensor:
        """Return the hidden state [T, hidden_size] behind the last layer. ``x`` is overwritten."""
        delta: torch.Tensor | None = None
        for number, layer in self.layers.items():
            delta = layer(x, delta, pools[number], batch)
        return x if delta is None else x.add_(delta)

    def final_state(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the final norm to [M, hidden_size]."""
        norm = self.weights.norm
        assert norm is not None
        return add_norm(x, None, norm, self.weights.eps)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the final norm and `lm_head` to [M, hidden_size].

        Returns [M, vocab_size] in bfloat16, or in float32 for one row. A rank returns its part of the
        vocabulary.
        """
        norm, head, eps = self.weights.norm, self.weights.head, self.weights.eps
        assert norm is not None
        assert head is not None
        if x.shape[0] == 1:
            return lone_linear(x, head, norm=norm, eps=eps, dtype=torch.float32)
        return multiply_in_parts(add_norm(x, None, norm, eps), head)
