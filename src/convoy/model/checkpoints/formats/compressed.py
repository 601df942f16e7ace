"""Unpack `compressed-tensors`, as llm-compressor writes them: packed integers, bytes, or 8-bit floats.

``X.weight_packed`` holds unsigned numbers in int32 words along a row; half their range is subtracted from
each. ``X.weight_zero_point`` is packed the same way down the columns. Unpacked weights keep the name
``X.weight``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from convoy.errors import ModelError
from convoy.model.checkpoints.checkpoint import StoredTensor
from convoy.model.checkpoints.formats.fp8 import of_activations, scaled_floats, word_floats
from convoy.model.checkpoints.formats.grid import GridScaled
from convoy.model.checkpoints.formats.mxfp4 import row_floats
from convoy.model.checkpoints.formats.nvfp4 import grouped_floats
from convoy.model.checkpoints.formats.unpacking import (
    FLOATS,
    StoredLayout,
    Unpacking,
    part_of,
    require,
    require_rank,
)
from convoy.plan.spec.config import ConfigReader
from convoy.plan.spec.quantization import Quantization

_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "naive-quantized",
    "float-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "dense",
    "mixed-precision",
)
_BITS = (4, 8)
_MAX_GROUP = 1 << 16
_PACKED = "_packed"


@dataclass(frozen=True)
class _Weights:
    """Hold the settings of a group of modules."""

    kind: str  # "int" or "float"
    bits: int
    strategy: str  # "tensor", "channel", "group" or "block"
    group_size: int | None
    block: tuple[int, int] | None

    def tile(self, num_rows: int, width: int) -> tuple[int, int]:
        """Return how many rows and inputs share a scale."""
        if self.strategy == "block" and self.block is not None:
            return self.block
        if self.strategy == "group" and self.group_size is not None:
            return 1, self.group_size
        return (1 if self.strategy == "channel" else num_rows), width


def describe_compressed(quantization: Quantization, tensors: Mapping[str, StoredTensor]) -> StoredLayout:
    """Describe a checkpoint. Raises ModelError naming the settings or tensors that do not fit together."""
    if quantization.settings.get("format", "dense") not in _FORMATS:
        raise quantization.wrong("format", f"one of {', '.join(_FORMATS)}")
    sparsity = quantization.settings.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise quantization.wrong("sparsity_config", "no sparsity")
    groups = _groups(quantization)
    made: dict[str, Unpacking] = {}
    shapes: set[str] = set()
    for name, scales in tensors.items():
        module = name.removesuffix(".weight_scale")
        if module == name:
            continue
        weights = _weights_of(quantization, groups, module, tensors)
        packed = tensors.get(f"{module}.weight{_PACKED}")
        if weights.kind == "float" and weights.bits == 4:
            packed = part_of(tensors, f"{module}.weight{_PACKED}", name)
            made[f"{module}.weight"] = _small_floats(f"{module}.weight", packed, scales, tensors)
        elif packed is not None:
            made[f"{module}.weight"] = _packed(module, tensors, weights)
            # the stored shape follows from the other tensors
            shapes.add(f"{module}.weight_shape")
        elif part_of(tensors, f"{module}.weight", name).dtype == "I8":
            made[f"{module}.weight"] = _bytes(module, tensors, weights)
        elif scales.dtype == "U8":
            made[f"{module}.weight"] = word_floats(f"{module}.weight", tensors[f"{module}.weight"], scales)
        else:
            block = weights.block if weights.strategy == "block" else None
            made[f"{module}.weight"] = scaled_floats(f"{module}.weight", tensors, block)
    return StoredLayout(made, of_activations(tensors) | (shapes & tensors.keys()))


def _small_floats(
    name: str, packed: StoredTensor, scales: StoredTensor, tensors: Mapping[str, StoredTensor]
) -> Unpacking:
    """Describe a matrix of 4-bit floats: MXFP4 with bytes as scales, NVFP4 with 8-bit floats."""
    if scales.dtype == "U8":
        return row_floats(name, packed, scales)
    factor = part_of(tensors, f"{name}_global_scale", scales.name)
    return grouped_floats(name, packed, scales, factor, divides=True)


def _packed(module: str, tensors: Mapping[str, StoredTensor], weights: _Weights) -> Unpacking:
    weight = require_rank(require(tensors[f"{module}.weight{_PACKED}"], ("I32",)), 2)
    per_word = 32 // weights.bits
    num_rows, num_words = weight.shape
    width = num_words * per_word
    tile = weights.tile(num_rows, width)
    grid = (-(-num_rows // tile[0]), width // tile[1])
    scales = tensors[f"{module}.weight_scale"]
    if width % tile[1]:
        raise ModelError(
            f"{weight.path}: {weight.name} has rows of {width} numbers, expected a multiple of the "
            f"group_size {tile[1]}"
        )
    parts = {"weight": weight, "scales": _scales(scales, grid)}
    zeros = tensors.get(f"{module}.weight_zero_point")
    if zeros is not None:
        packed_down = (-(-grid[0] // per_word), grid[1])
        is_packed = zeros.dtype == "I32"
        parts["zeros"] = require(zeros, ("I32", "I8"), packed_down if is_packed else grid)
    places = tensors.get(f"{module}.weight_g_idx")
    if places is not None:
        parts["places"] = require(places, ("I32", "I64"), (width,))
    return GridScaled(f"{module}.weight", (num_rows, width), parts, tile, weights.bits)


def _bytes(module: str, tensors: Mapping[str, StoredTensor], weights: _Weights) -> Unpacking:
    weight = require_rank(tensors[f"{module}.weight"], 2)
    num_rows, width = weight.shape
    tile = weights.tile(num_rows, width)
    grid = (-(-num_rows // tile[0]), -(-width // tile[1]))
    parts = {"weight": weight, "scales": _scales(tensors[f"{module}.weight_scale"], grid)}
    zeros = tensors.get(f"{module}.weight_zero_point")
    if zeros is not None:
        parts["zeros"] = require(zeros, ("I8",), grid, *_flat(grid))
    places = tensors.get(f"{module}.weight_g_idx")
    if places is not None:
        parts["places"] = require(places, ("I32", "I64"), (width,))
    return GridScaled(f"{module}.weight", weight.shape, parts, tile)


def _scales(scales: StoredTensor, grid: tuple[int, int]) -> StoredTensor:
    return require(scales, FLOATS, grid, *_flat(grid))


def _flat(grid: tuple[int, int]) -> list[tuple[int, ...]]:
    """Return the other shapes in which a grid of one column may be stored."""
    return [*([(grid[0],)] if grid[1] == 1 else []), *([()] if grid == (1, 1) else [])]


def _groups(quantization: Quantization) -> dict[tuple[str, ...], _Weights]:
    """Return the settings of each group, by the group's targets."""
    listed = quantization.settings.get("config_groups")
    if not isinstance(listed, Mapping) or not listed:
        raise quantization.wrong("config_groups", "an object with a group")
    found = {}
    for name, group in listed.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(group, Mapping) and "weights" in group and weights is None:
            # a group for activations alone
            continue
        targets = group.get("targets") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping) or not isinstance(targets, list):
            raise quantization.wrong("config_groups", f"weights and targets in {name}")
        found[tuple(map(str, targets))] = _read_weights(quantization, weights)
    return found


def _read_weights(quantization: Quantization, settings: Mapping[str, object]) -> _Weights:
    reader = ConfigReader(settings, quantization.model)
    kind = reader.word("type") or "int"
    bits = reader.count("num_bits", most=32)
    if kind not in {"int", "float"} or bits not in _BITS:
        raise reader.wrong("num_bits", bits, "4 or 8 bits")
    group_size = (
        None if settings.get("group_size") == -1 else reader.optional_count("group_size", most=_MAX_GROUP)
    )
    if kind == "float" and bits == 4:
        # NVFP4 and MXFP4 have one form each: the tensors show it
        return _Weights(kind, bits, "tensor", None, None)
    strategy = reader.word("strategy") or ("group" if group_size else "tensor")
    block = settings.get("block_structure")
    tile = None
    if isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
        tile = (block[0], block[1])
    known = {"tensor": True, "channel": True, "group": group_size is not None, "block": tile is not None}
    if not known.get(strategy, False):
        raise reader.wrong(
            "strategy", strategy, "tensor, channel, group with a group_size, or block with its sizes"
        )
    return _Weights(kind, bits, strategy, group_size, tile)


def _weights_of(
    quantization: Quantization,
    groups: Mapping[tuple[str, ...], _Weights],
    module: str,
    tensors: Mapping[str, StoredTensor],
) -> _Weights:
    """Return the only settings there are, those of the group that names the module, or those that fit it.

    Targets may be patterns. They are not run, because a pattern may take for ever: the stored tensors show
    which settings are theirs. Raises ModelError where they do not.
    """
    if len(set(groups.values())) == 1:
        return next(iter(groups.values()))
    for targets, weights in groups.items():
        if any(module == one or module.endswith(f".{one}") for one in targets):
            return weights
    fitting = {weights for weights in groups.values() if _fits(weights, module, tensors)}
    if len(fitting) == 1:
        return fitting.pop()
    general = [weights for targets, weights in groups.items() if "Linear" in targets]
    if len(general) != 1 or any(one.startswith("re:") for targets in groups for one in targets):
        raise quantization.wrong("config_groups", f"one group for {module}, by its name or as Linear")
    return general[0]


def _fits(weights: _Weights, module: str, tensors: Mapping[str, StoredTensor]) -> bool:
    """Return whether a module's tensors have the dtypes and shapes of these settings."""
    stored = tensors.get(f"{module}.weight{_PACKED}") or tensors.get(f"{module}.weight")
    if stored is None or len(stored.shape) != 2:
        return False
    is_packed = stored.name.endswith(_PACKED)
    if weights.kind == "float":
        return stored.dtype == "U8" if weights.bits == 4 else stored.dtype.startswith("F8_")
    if stored.dtype != ("I32" if is_packed else "I8"):
        return False
    num_rows, width = stored.shape[0], stored.shape[1] * (32 // weights.bits if is_packed else 1)
    tile = weights.tile(num_rows, width)
    grid = (-(-num_rows // tile[0]), -(-width // tile[1]))
    return tensors[f"{module}.weight_scale"].shape in (grid, *_flat(grid))
