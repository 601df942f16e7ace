"""Unpack MLX's affine quantisation: groups along a row, each of which is ``scale * code + bias``.

The layout is that of `mlx.core.quantize`, the names are those of `mlx_lm.convert`: ``weight`` in uint32 words
beside ``scales`` and ``biases``. config.json holds the settings of all layers, and those of single layers
under their names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from convoy.config.kernels import KEPT_FORMS
from convoy.errors import ModelError
from convoy.model.checkpoints.checkpoint import StoredTensor
from convoy.model.checkpoints.formats.unpacking import (
    FLOATS,
    Index,
    Parts,
    StoredLayout,
    Unpacking,
    part_of,
    require,
    require_rank,
)
from convoy.plan.spec.quantization import Quantization

if TYPE_CHECKING:
    import torch

    from convoy.model.kernels.stored.weights import Stored

_BITS = (2, 3, 4, 5, 6, 8)
_MAX_GROUP = 1 << 16
# inputs that kernels unpack together, under one scale
_CODES = 8
_LOOKED_UP = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# `mlx_lm` stacks experts under this name; checkpoints for transformers store them one by one
_STACKS = ".switch_mlp."


@dataclass(frozen=True)
class AffineRows(Unpacking):
    """Unpack rows of codes; leading dimensions are experts."""

    bits: int
    group_size: int

    def pieces(self, parts: Parts) -> Iterator[tuple[Index, torch.Tensor]]:
        """Yield rows, expert by expert."""
        import torch

        from convoy.model.kernels.stored.bits import stream_codes

        weight, scales, biases = (parts[role] for role in ("weight", "scales", "biases"))
        num_rows, width = self.shape[-2:]
        for lead in _leads(self.shape):
            for rows in self.row_slices(num_rows, width):
                place: Index = (*lead, rows)
                codes = stream_codes(weight[place], self.bits).to(torch.float32)
                values = codes.view(*codes.shape[:-1], -1, self.group_size)
                values *= scales[place].to(torch.float32).unsqueeze(-1)
                values += biases[place].to(torch.float32).unsqueeze(-1)
                yield place, values.flatten(-2)

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of codes, scales and biases, for widths of codes that are kept."""
        if f"affine{self.bits}" not in KEPT_FORMS or self.group_size % _CODES:
            return 0
        return sum(part.num_bytes for part in self.parts.values())

    def kept(self, parts: Parts) -> Stored | None:
        """Return the matrix over the codes, or a stack of one for each expert."""
        import torch

        from convoy.model.kernels.stored.matrix import StoredMatrix, StoredRange
        from convoy.model.kernels.stored.weights import StoredStack

        # torch cannot index its unsigned words
        codes, scales, biases = parts["weight"].view(torch.int32), parts["scales"], parts["biases"]
        found = []
        num_rows, width = self.shape[-2:]
        for lead in _leads(self.shape):
            own = {"codes": codes[lead], "scales": scales[lead], "biases": biases[lead]}
            one = StoredRange(f"affine{self.bits}", num_rows, width, own, self.group_size)
            found.append(StoredMatrix((one,)))
        return found[0] if len(self.shape) == 2 else StoredStack(tuple(found))


@dataclass(frozen=True)
class TiedRows(AffineRows):
    """Unpack an embedding that is the output too. Both have the rounded values, so these are kept."""

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of the values in 16 bits."""
        return 2 * math.prod(self.shape)

    def kept(self, parts: Parts) -> Stored | None:
        """Return the matrix of rounded values."""
        import torch

        from convoy.model.kernels.stored.weights import plain_matrix

        values = torch.empty(self.shape, dtype=getattr(torch, self.dtype))
        for index, piece in self.pieces(parts):
            values[index] = piece
        return plain_matrix(values)


@dataclass(frozen=True)
class JoinedRows(Unpacking):
    """Join several tensors along their rows."""

    wholes: tuple[Unpacking, ...]

    def pieces(self, parts: Parts) -> Iterator[tuple[Index, torch.Tensor]]:
        """Yield the pieces of each tensor in turn."""
        start = 0
        for number, whole in enumerate(self.wholes):
            own = {role: parts[f"{number}.{role}"] for role in whole.parts}
            for index, values in whole.pieces(own):
                rows = index[-1]
                assert isinstance(rows, slice)
                yield (*index[:-1], slice(rows.start + start, rows.stop + start)), values
            start += whole.shape[-2]

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of all tensors if each can be kept."""
        each = [whole.kept_bytes for whole in self.wholes]
        return sum(each) if all(each) else 0

    def kept(self, parts: Parts) -> Stored | None:
        """Return the stacks joined expert by expert."""
        from convoy.model.kernels.stored.matrix import StoredMatrix
        from convoy.model.kernels.stored.weights import StoredStack

        stacks = []
        for number, whole in enumerate(self.wholes):
            stack = whole.kept({role: parts[f"{number}.{role}"] for role in whole.parts})
            assert isinstance(stack, StoredStack), "only stacks of experts are joined"
            stacks.append(stack.matrices)
        return StoredStack(tuple(StoredMatrix.joined(one) for one in zip(*stacks, strict=True)))


def describe_mlx(quantization: Quantization, tensors: Mapping[str, StoredTensor]) -> StoredLayout:
    """Describe a checkpoint. Raises ModelError naming the settings or tensors that do not fit together."""
    made = [
        _affine(quantization, tensors, name.removesuffix(".scales"))
        for name in tensors
        if name.endswith(".scales")
    ]
    return StoredLayout({whole.name: whole for whole in _with_stacks(made)})


def _affine(quantization: Quantization, tensors: Mapping[str, StoredTensor], module: str) -> AffineRows:
    bits, group_size = _settings(quantization, module)
    scales = require_rank(require(tensors[f"{module}.scales"], FLOATS), 2, 3)
    weight = part_of(tensors, f"{module}.weight", scales.name)
    biases = part_of(tensors, f"{module}.biases", scales.name)
    width = scales.shape[-1] * group_size
    if width * bits % 32:
        raise ModelError(
            f"{weight.path}: {weight.name} has rows of {width} numbers of {bits} bits, expected whole words"
        )
    require(weight, ("U32",), (*scales.shape[:-1], width * bits // 32))
    require(biases, (scales.dtype,), scales.shape)
    # round embeddings as MLX does, as rows are looked up; matrices are multiplied unrounded
    dtype = _LOOKED_UP[scales.dtype] if module.endswith("embed_tokens") else "float32"
    is_tied = dtype != "float32" and not any(
        name.endswith(("lm_head.scales", "lm_head.weight")) for name in tensors
    )
    return (TiedRows if is_tied else AffineRows)(
        weight.name,
        (*scales.shape[:-1], width),
        {"weight": weight, "scales": scales, "biases": biases},
        bits,
        group_size,
        dtype=dtype,
    )


def _settings(quantization: Quantization, module: str) -> tuple[int, int]:
    """Return bits and group size of one module."""
    own = quantization.settings.get(module)
    if isinstance(own, Mapping):
        quantization = replace(quantization, settings=own, key=f"{quantization.key}.{module}")
    mode = quantization.settings.get("mode", "affine")
    if mode != "affine":
        raise quantization.wrong("mode", "affine")
    bits = quantization.reader.count("bits", most=32)
    if bits not in _BITS:
        raise quantization.wrong("bits", f"one of {', '.join(map(str, _BITS))}")
    return bits, quantization.reader.count("group_size", most=_MAX_GROUP)


def _with_stacks(made: list[AffineRows]) -> Iterator[Unpacking]:
    """Rename stacked experts to the library's names, with gate and up projections joined."""
    stacks = {whole.name: whole for whole in made if _STACKS in whole.name}
    yield from (whole for whole in made if whole.name not in stacks)
    for name, whole in stacks.items():
        prefix, _, rest = name.partition(_STACKS)
        if rest == "down_proj.weight":
            yield replace(whole, name=f"{prefix}.experts.down_proj")
        elif rest == "gate_proj.weight":
            up = stacks.get(f"{prefix}{_STACKS}up_proj.weight")
            if up is None or up.shape != whole.shape:
                raise ModelError(
                    f"{whole.parts['weight'].path}: {name} has no up_proj of its shape beside it"
                )
            yield _joined(f"{prefix}.experts.gate_up_proj", (whole, up))


def _joined(name: str, wholes: tuple[Unpacking, ...]) -> JoinedRows:
    parts = {f"{i}.{role}": part for i, one in enumerate(wholes) for role, part in one.parts.items()}
    *lead, _, width = wholes[0].shape
    return JoinedRows(name, (*lead, sum(one.shape[-2] for one in wholes), width), parts, wholes)


def _leads(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if len(shape) == 2:
        yield ()
    else:
        yield from ((number,) for number in range(shape[0]))
