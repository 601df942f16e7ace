"""Cut matrices for one rank of a stage: outputs by heads or alike, inputs by whole groups of codes.

Norms, routers and latents are whole on every rank. `plan.spec.sharding` has checked that heads and widths
divide.
"""

from __future__ import annotations

import mlx.core as mx

from convoy.model.backends.mlx.layers.experts import ExpertStack
from convoy.model.backends.mlx.layers.matrices import CodedMatrix, Linear, Matrix
from convoy.model.backends.mlx.supported import INPUT_SLICES
from convoy.plan.spec.model import ModelSpec
from convoy.plan.spec.sharding import WHOLE, Shard, first_kv_head, kv_heads_of

_OUTPUTS = frozenset({"q_proj", "q_b_proj", "gate_proj", "up_proj"})
_KEYS = frozenset({"k_proj", "v_proj"})


class RankSlicer:
    """Return a rank's slice of the parts of a stage, or a part itself where one rank holds the stage."""

    def __init__(self, spec: ModelSpec, shard: Shard) -> None:
        self.shard = shard
        self._num_kv_heads = {
            layer: group.num_kv_heads for group in spec.cache_groups for layer in group.layers
        }

    def own_experts(self, count: int) -> range | None:
        """Return the rank's experts of ``count`` where they are shared out whole, or None."""
        if self.shard == WHOLE or self.shard.experts != "whole":
            return None
        own = count // self.shard.world_size
        return range(self.shard.rank * own, (self.shard.rank + 1) * own)

    def share(self, size: int) -> slice:
        """Return the rank's run of ``size`` equal parts, of which ranks have as many each."""
        own = size // self.shard.world_size
        return slice(self.shard.rank * own, (self.shard.rank + 1) * own)

    def linear(self, module: str, whole: Linear) -> Linear:
        """Return the slice of a linear, by its name. A bias of sums over all ranks is rank 0's alone."""
        leaf = module.rpartition(".")[2]
        if self.shard == WHOLE or leaf not in _OUTPUTS | _KEYS | INPUT_SLICES:
            return whole
        if leaf in INPUT_SLICES:
            return Linear(self._inputs(module, whole.matrix), None if self.shard.rank else whole.bias)
        rows = self._rows(module, leaf, whole.matrix.arrays[0].shape[-2])
        bias = None if whole.bias is None else whole.bias[rows]
        return Linear(evaluated(whole.matrix.outputs(rows)), bias)

    def stack(self, module: str, whole: ExpertStack) -> ExpertStack:
        """Return the slice of the experts' matrices: some experts, or a part of each."""
        if self.shard == WHOLE:
            return whole
        own = self.own_experts(whole.matrix.arrays[0].shape[0])
        if own is not None:
            bias = None if whole.bias is None else whole.bias[own.start : own.stop]
            return ExpertStack(evaluated(whole.matrix.experts(own)), bias)
        if module.rpartition(".")[2] in INPUT_SLICES:
            return ExpertStack(self._inputs(module, whole.matrix), None if self.shard.rank else whole.bias)
        rows = self.share(whole.matrix.arrays[0].shape[-2])
        bias = None if whole.bias is None else whole.bias[:, rows]
        return ExpertStack(evaluated(whole.matrix.outputs(rows)), bias)

    def vocabulary(self, whole: Matrix) -> Matrix:
        """Return the rank's rows. All ranks have as many; the last rank's end with zeros."""
        if self.shard == WHOLE:
            return whole
        num_rows = whole.arrays[0].shape[0]
        own = -(-num_rows // self.shard.world_size)
        first = min(num_rows, self.shard.rank * own)
        found = whole.outputs(slice(first, min(num_rows, first + own)))
        return evaluated(found.padded(own))

    def _rows(self, module: str, leaf: str, num_rows: int) -> slice:
        if leaf not in _KEYS:
            return self.share(num_rows)
        heads = self._num_kv_heads[int(module.split(".")[2])]
        size, first = num_rows // heads, first_kv_head(heads, self.shard)
        return slice(first * size, (first + kv_heads_of(heads, self.shard.world_size)) * size)

    def _inputs(self, module: str, whole: Matrix) -> Matrix:
        own = self.share(whole.num_inputs)
        if isinstance(whole, CodedMatrix):
            is_cut = own.start % whole.group_size or own.stop % whole.group_size
            assert not is_cut, f"`check_slices` was not asked of {module}"
        return evaluated(whole.inputs(own))


def evaluated(matrix: Matrix) -> Matrix:
    """Return a matrix of which no array is a view, so that the whole it was cut from can go."""
    mx.eval(*matrix.arrays)
    return matrix
