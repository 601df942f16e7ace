"""Compute rotary positions from config.json.

The kinds are "default", "linear" and "llama3", as in `transformers.modeling_rope_utils`. A position's angles
do not depend on the step, so all cuts have the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from convoy.errors import ModelError
from convoy.model.checkpoints.source import ModelSource

KINDS = ("default", "linear", "llama3")
_BASE = 10000.0

Rotation = tuple[mx.array, mx.array]


def rope_kind(source: ModelSource) -> str:
    """Return the word of the rotation's kind in config.json, or "by layer type" for several of them."""
    rope = _settings(source)
    if any(isinstance(value, Mapping) for value in rope.values()):
        return "by layer type"
    return str(rope.get("rope_type", rope.get("type", "default")))


class RotationTable:
    """Return the factors of positions."""

    def __init__(self, source: ModelSource, head_dim: int) -> None:
        """Read the rotation of ``source``. Raises ModelError for a missing number or another kind."""
        self._frequencies = _frequencies(source, head_dim)

    def look_up(self, positions: npt.NDArray[np.int64]) -> Rotation:
        """Return cos and sin of ``positions`` [T], each float32 [T, 1, rotary_dim / 2]."""
        # The product is rounded to float32 as the library does it; then sine and cosine are rounded once.
        angles = (positions.astype(np.float32)[:, None] * self._frequencies).astype(np.float64)
        cos, sin = (turn(angles).astype(np.float32)[:, None] for turn in (np.cos, np.sin))
        return mx.array(cos), mx.array(sin)


def rotate(x: mx.array, rotation: Rotation) -> mx.array:
    """Rotate ``x`` [T, heads, head_dim]: the first half of the rotary part turns with the second."""
    cos, sin = rotation
    half = cos.shape[-1]
    wide = x.astype(mx.float32)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    turned = mx.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
    return turned.astype(x.dtype)


def _settings(source: ModelSource) -> Mapping[str, object]:
    rope = source.config.get("rope_parameters") or source.config.get("rope_scaling") or {}
    return rope if isinstance(rope, Mapping) else {}


def _frequencies(source: ModelSource, head_dim: int) -> npt.NDArray[np.float32]:
    rope = _settings(source)
    kind = rope_kind(source)
    share = _number(source, rope, "partial_rotary_factor", 1.0)
    base = _number(source, rope, "rope_theta", _BASE)
    size = int(head_dim * share)
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    found = (1.0 / np.power(float(base), exponents.astype(np.float64))).astype(np.float32)
    if kind == "default":
        return found
    if kind == "linear":
        return (found / np.float32(_number(source, rope, "factor"))).astype(np.float32)
    if kind == "llama3":
        return _llama3(source, rope, found)
    raise ModelError(f"{source.name}: mlx has no rotation of the type {kind}, expected {', '.join(KINDS)}")


def _llama3(
    source: ModelSource, rope: Mapping[str, object], found: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Return frequencies of Llama 3.1: low ones divided by a factor, those between blended."""
    factor, low, high, original = (
        _number(source, rope, key)
        for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    if high <= low:
        raise ModelError(
            f"{source.name}: high_freq_factor is {high:g} and low_freq_factor {low:g}, expected a higher one"
        )
    lengths = 2 * math.pi / found
    blend = (original / lengths - low) / (high - low)
    smooth = (1 - blend) * (found / factor) + blend * found
    scaled = np.where(lengths > original / low, found / factor, found)
    between = (lengths <= original / low) & (lengths >= original / high)
    return np.where(between, smooth, scaled).astype(np.float32)


def _number(source: ModelSource, rope: Mapping[str, object], key: str, default: float | None = None) -> float:
    """Return a number above 0 of the rotation, or of config.json itself. Raises ModelError."""
    value = rope.get(key, source.config.get(key, default))
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelError(f"{source.name}: {key} is {value!r}, expected a number above 0")
    return float(value)
