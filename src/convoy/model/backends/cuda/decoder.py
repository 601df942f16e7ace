"""The layers of a stage on a device: which kernel follows which.

Two ways. A lone row takes `gpu.lone`'s linears, which do the norm, the gate and the sum on the way. Several
rows take matrix products (`gpu.linears`), and `gpu.pointwise` between them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from convoy.model.backends.cuda.batch import DeviceBatch
from convoy.model.backends.cuda.kernels.attention import attend
from convoy.model.backends.cuda.kernels.linears import multiply, multiply_in_parts
from convoy.model.backends.cuda.kernels.lone import lone_linear
from convoy.model.backends.cuda.kernels.pointwise import Rotation, add_norm, gate, rotate_and_store
from convoy.model.backends.cuda.kernels.sums import DeviceSums
from convoy.model.backends.cuda.memory.pools import LayerPool
from convoy.model.backends.cuda.memory.weights import DeviceLayerWeights, StageWeights


class LlamaLayer(nn.Module):
    """One layer. What its MLP adds is left to the next norm, which adds and norms in one pass."""

    def __init__(self, own: DeviceLayerWeights, rotation: Rotation, eps: float) -> None:
        super().__init__()
        self._own = own
        self._rotation = rotation
        self._eps = eps
        self.sums: DeviceSums | None = None  # of a rank

    def forward(
        self, x: torch.Tensor, delta: torch.Tensor | None, pool: LayerPool, batch: DeviceBatch
    ) -> torch.Tensor | None:
        """``x`` [T, hidden_size] gets ``delta`` and what attention adds; what the MLP adds is returned.

        Of a lone row, and of ranks, ``x`` gets all, and nothing is returned.
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
        qkv = multiply(add_norm(x, delta, own.input_norm, eps), own.qkv, own.qkv_bias)
        delta = multiply(self._attend(qkv, pool, batch), own.out, own.out_bias)
        both = multiply(add_norm(x, delta, own.middle_norm, eps), own.gate_up, own.gate_up_bias)
        return multiply(gate(both), own.down, own.down_bias)

    def _share(self, x: torch.Tensor, pool: LayerPool, batch: DeviceBatch, sums: DeviceSums) -> None:
        """The same with slices: what each rank adds is summed with the residual, and rounded once."""
        own, eps = self._own, self._eps
        if x.shape[0] == 1:
            part = torch.float32
            qkv = lone_linear(x, own.qkv, bias=own.qkv_bias, norm=own.input_norm, eps=eps)
            whole = self._attend(qkv, pool, batch)
            sums.add(lone_linear(whole, own.out, bias=own.out_bias, dtype=part), x, adds=True)
            between = lone_linear(
                x, own.gate_up, bias=own.gate_up_bias, norm=own.middle_norm, eps=eps, gated=True
            )
            sums.add(lone_linear(between, own.down, bias=own.down_bias, dtype=part), x, adds=True)
            return
        qkv = multiply(add_norm(x, None, own.input_norm, eps), own.qkv, own.qkv_bias)
        sums.add(multiply(self._attend(qkv, pool, batch), own.out, own.out_bias), x, adds=True)
        both = multiply(add_norm(x, None, own.middle_norm, eps), own.gate_up, own.gate_up_bias)
        sums.add(multiply(gate(both), own.down, own.down_bias), x, adds=True)

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
    """Layers of a Llama's shape, over `gpu.weights`."""

    can_capture = True
    takes_tokens = False  # beside the embedding's

    def __init__(self, weights: StageWeights, rotation: Rotation) -> None:
        self.weights = weights
        self.layers = {
            number: LlamaLayer(own, rotation, weights.eps) for number, own in weights.layers.items()
        }
        self._sums: DeviceSums | None = None

    def join(self, sums: DeviceSums) -> None:
        """What is here are slices, and this the way to the other ranks."""
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
        """[T, hidden_size] of int32 token ids [T]."""
        assert self.weights.embedding is not None
        rows, sums = self.weights.embedding, self._sums
        if sums is None:
            return rows.index_select(0, ids)
        own = ids - sums.rank * rows.shape[0]
        foreign = (own < 0) | (own >= rows.shape[0])
        found = rows.index_select(0, own.masked_fill(foreign, 0))
        # on one rank a token has its row, and on the others zeros
        return sums.all_reduce(found.masked_fill_(foreign[:, None], 0.0))

    def run(
        self,
        x: torch.Tensor,
        ids: torch.Tensor | None,  # noqa: ARG002 - of others
        batch: DeviceBatch,
        pools: Mapping[int, LayerPool],
    ) -> torch.Tensor:
        """[T, hidden_size] behind the last layer; ``x`` is used up."""
        delta: torch.Tensor | None = None
        for number, layer in self.layers.items():
            delta = layer(x, delta, pools[number], batch)
        return x if delta is None else x.add_(delta)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Final norm and `lm_head` of [M, hidden_size]: [M, vocab_size], bfloat16, or float32 of one row.

        Of a rank its part of the vocabulary.
        """
        norm, head, eps = self.weights.norm, self.weights.head, self.weights.eps
        assert norm is not None
        assert head is not None
        if x.shape[0] == 1:
            return lone_linear(x, head, norm=norm, eps=eps, dtype=torch.float32)
        return multiply_in_parts(add_norm(x, None, norm, eps), head)
