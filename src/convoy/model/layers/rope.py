"""Look up rotary positions, computed once per fixed block of positions.

cos and sin of the same position must have the same bits in every batch. Vector and scalar code paths may
differ, and so may thread chunks. So the model's own rotary module runs on whole blocks, always the same
ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from convoy.model.kernels.native.batch import spread as native_spread

# 64 positions of at most 512 rotary dimensions stay below ATen's threading grain of 32,768 elements.
_BLOCK = 64

# A pair of cos and sin.
Rotation = tuple[torch.Tensor, torch.Tensor]


# Tuples, because each step looks rotations up by them, and a dataclass is hashed in Python.
class HeadSpread(NamedTuple):
    """Describe the heads over which a rotation is laid out, so that one operation covers q, k and v."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float  # of the scores, applied to q


class RopeUse(NamedTuple):
    """Name the rotation of a layer, and its form."""

    # None: all layers have the same rotation.
    layer_type: str | None = None
    # None: in the form of the library's layer.
    spread: HeadSpread | None = None


class RopeTable:
    """Hold cos and sin for positions 0..max_context, filled on demand."""

    def __init__(
        self,
        rotary: nn.Module,
        max_context: int,
        layer_type: str | None = None,
        computed: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._rotary = rotary
        # Entered around the library's module.
        self._computed = computed
        self._max_context = max_context
        self._max_blocks = -(-max_context // _BLOCK)
        self._arguments = {} if layer_type is None else {"layer_type": layer_type}
        name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
        frequencies: Any = getattr(rotary, name, None)
        # Some models return cos and sin once for both halves of a head.
        self._whole = 2 * frequencies.numel() if isinstance(frequencies, torch.Tensor) else 0
        self._cos = torch.empty(0)
        self._sin = torch.empty(0)

    def look_up(self, positions: torch.Tensor, last: int) -> Rotation:
        """Return cos and sin, each [1, T, width], of int64 ``positions`` [T], none beyond ``last``."""
        if last >= self._cos.shape[0]:
            self._grow(last // _BLOCK + 1)
        return self._cos.index_select(0, positions)[None], self._sin.index_select(0, positions)[None]

    def both_halves(self, rotation: Rotation) -> Rotation:
        """Return a rotation of `look_up` with values for both rotated halves, [1, T, rotary_dim]."""
        cos, sin = rotation
        if 2 * cos.shape[-1] != self._whole:
            return rotation
        return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)

    def _grow(self, num_blocks: int) -> None:
        done = self._cos.shape[0] // _BLOCK
        # Doubling: a long decode should not copy the table at every 64th token.
        num_blocks = max(num_blocks, min(2 * done, self._max_blocks))
        cos, sin = [self._cos] if done else [], [self._sin] if done else []
        for block in range(done, num_blocks):
            # Some rotary modules change their frequencies beyond the context, which a last block must
            # therefore not reach.
            positions = torch.arange(block * _BLOCK, (block + 1) * _BLOCK).clamp_(max=self._max_context - 1)
            with self._computed():
                block_cos, block_sin = self._rotary(torch.empty(0), positions[None], **self._arguments)
            cos.append(block_cos[0])
            sin.append(block_sin[0])
        self._cos, self._sin = torch.cat(cos), torch.cat(sin)


class RoundedOnce(TorchFunctionMode):
    """Compute powers, sines and cosines of float32 in float64, and round the result once.

    Their float32 forms differ by a unit between processors and builds of torch. In float64 such a difference
    is rounded away but for one number in some hundred million.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _INEXACT:
            return func(*args, **(kwargs or {}))
        wide = [one.to(torch.float64) if isinstance(one, torch.Tensor) else one for one in args]
        return func(*wide, **(kwargs or {})).to(torch.float32)


_INEXACT = {
    *(torch.cos, torch.sin, torch.pow, torch.Tensor.cos, torch.Tensor.sin),
    *(torch.Tensor.pow, torch.Tensor.__pow__, torch.Tensor.__rpow__),
}


class Rotations:
    """Hold the tables of a model, one for each type of layer with a rotation of its own."""

    def __init__(self, rotary: Any, max_context: int, *, is_exact: bool = False) -> None:
        """Take the library's module. An exact table and its frequencies are `RoundedOnce`."""
        self._computed = RoundedOnce if is_exact else nullcontext
        if is_exact:
            with RoundedOnce():
                rotary = type(rotary)(rotary.config)
        self._rotary = rotary
        self._max_context = max_context
        self._tables: dict[str | None, RopeTable] = {}

    def look_up(self, uses: Iterable[RopeUse], positions: torch.Tensor, last: int) -> dict[RopeUse, Rotation]:
        """Return the rotation of each of ``uses`` at int64 ``positions`` [T], none beyond ``last``."""
        return {use: self._of(use, positions, last) for use in dict.fromkeys(uses)}

    def _of(self, use: RopeUse, positions: torch.Tensor, last: int) -> Rotation:
        table = self._tables.get(use.layer_type)
        if table is None:
            table = RopeTable(self._rotary, self._max_context, use.layer_type, self._computed)
            self._tables[use.layer_type] = table
        rotation = table.look_up(positions, last)
        if use.spread is None:
            return rotation
        both = table.both_halves(rotation)
        return native_spread(*both, use.spread) or spread_over_heads(*both, use.spread)


def spread_over_heads(cos: torch.Tensor, sin: torch.Tensor, spread: HeadSpread) -> Rotation:
    """Return factors, each [T, num_heads + 2 * num_kv_heads, head_dim], for one operation over q, k and v.

    Let r be x with its rotary dimensions rolled by half their number. Then x * cos + r * sin rotates q and
    k and scales q. It leaves v and the dimensions beyond the rotary ones unchanged. ``cos`` and ``sin``
    are [1, T, rotary_dim].
    """
    half, rest = cos.shape[-1] // 2, spread.head_dim - cos.shape[-1]
    signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
    factors = []
    for values, neutral in ((cos[0], 1.0), (signed, 0.0)):
        wide = nn.functional.pad(values, (0, rest), value=neutral) if rest else values
        key = wide[:, None].expand(-1, spread.num_kv_heads, -1)
        query = (wide * spread.scaling)[:, None].expand(-1, spread.num_heads, -1)
        factors.append(torch.cat((query, key, torch.full_like(key, neutral)), dim=1))
    return factors[0], factors[1]
