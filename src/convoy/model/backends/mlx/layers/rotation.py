"""Compute rotary positions from the library's configuration.

A position's angles do not depend on the step, so all cuts have the same bits. The library's formulas give the
frequencies of every kind of rotation but the default, as in `transformers.modeling_rope_utils`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from convoy.errors import ModelError
from convoy.model.layers.rope import RoundedOnce
from convoy.model.library import FAILURES, LIBRARY, reason

Rotation = tuple[mx.array, mx.array]


class _Table:
    """Return the factors of positions for one kind of layer."""

    def __init__(self, frequencies: npt.NDArray[np.float32], scaling: float) -> None:
        self._frequencies = frequencies
        self._scaling = scaling

    def look_up(self, positions: npt.NDArray[np.int64]) -> Rotation:
        # The product is rounded to float32 as the library does it; then sine and cosine are rounded once.
        angles = (positions.astype(np.float32)[:, None] * self._frequencies).astype(np.float64)
        cos, sin = ((turn(angles) * self._scaling).astype(np.float32)[:, None] for turn in (np.cos, np.sin))
        return mx.array(cos), mx.array(sin)


class MlxRotations:
    """Hold a table for each kind of layer: types of layers may turn in different ways."""

    def __init__(self, name: str, config: Any, widths: Mapping[int, int]) -> None:
        """Read the rotation of each layer in ``widths``, which has the width of its heads.

        Raises ModelError for a rotation that the library does not have.
        """
        self._kinds: dict[int, tuple[str | None, int]] = {}
        self._tables: dict[tuple[str | None, int], _Table] = {}
        parameters = config.rope_parameters
        by_type = any(isinstance(value, Mapping) for value in parameters.values())
        for layer, width in widths.items():
            layer_type = config.layer_types[layer] if by_type else None
            kind = (layer_type, width)
            self._kinds[layer] = kind
            if kind not in self._tables:
                own = parameters[layer_type] if by_type else parameters
                self._tables[kind] = _Table(*_frequencies(name, config, own, layer_type, width))

    def look_up(self, positions: npt.NDArray[np.int64]) -> dict[int, Rotation]:
        """Return cos and sin of ``positions`` [T] for each layer, each float32 [T, 1, rotary_dim / 2]."""
        found = {kind: table.look_up(positions) for kind, table in self._tables.items()}
        return {layer: found[kind] for layer, kind in self._kinds.items()}


def rotate(x: mx.array, rotation: Rotation) -> mx.array:
    """Rotate ``x`` [T, heads, head_dim]: the first half of the rotary part turns with the second."""
    cos, sin = rotation
    half = cos.shape[-1]
    wide = x.astype(mx.float32)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    turned = mx.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
    return turned.astype(x.dtype)


def _frequencies(
    name: str, config: Any, own: Mapping[str, Any], layer_type: str | None, width: int
) -> tuple[npt.NDArray[np.float32], float]:
    """Return the frequencies, and the factor of cosines and sines."""
    kind = own.get("rope_type", "default")
    if kind == "default":
        size = int(width * own.get("partial_rotary_factor", 1.0))
        exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
        powers = np.power(float(own["rope_theta"]), exponents.astype(np.float64)).astype(np.float32)
        return (np.float32(1.0) / powers).astype(np.float32), 1.0
    with LIBRARY:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        if kind not in ROPE_INIT_FUNCTIONS:
            raise ModelError(f"{name}: rope type {kind!r} is not supported")
        try:
            with RoundedOnce():
                found, scaling = ROPE_INIT_FUNCTIONS[kind](config, None, layer_type=layer_type)
        except FAILURES as error:
            raise ModelError(f"{name}: config.json is not accepted: {reason(error)}") from error
    return found.numpy(), float(scaling)
