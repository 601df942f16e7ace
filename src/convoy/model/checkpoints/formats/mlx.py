"""Unpack MLX's modes of quantisation: affine, where a group is ``scale * code + bias``, and small floats.

The layout is that of MLX's `quantize`, the names are those of `mlx_lm.convert`: ``weight`` in uint32 words
beside ``scales``, and ``biases`` of affine groups. config.json holds the settings of all layers, and those of
single layers under their names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from convoy.errors import ModelError
from convoy.model.checkpoints.checkpoint import StoredTensor
from convoy.model.checkpoints.formats.arrange import arranged, plain
from convoy.model.checkpoints.formats.fp8 import word_floats
from convoy.model.checkpoints.formats.mxfp4 import row_floats
from convoy.model.checkpoints.formats.nvfp4 import grouped_floats
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
# bits and group size of an affine layer that has none of its own, or null
_USUAL = {"bits": 4, "group_size": 64}
_MAX_GROUP = 1 << 16
# inputs of which codes of any width fill whole bytes
_CODES = 8
_LOOKED_UP = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class _Row:
    """Name the tensors of `mlx_lm`, behind a module's name, that make one of the library's."""

    # behind the prefix of the layer
    target: str
    arrangement: str
    stored: tuple[str, ...]


def _rows(*rows: _Row) -> dict[str, _Row]:
    return {name: row for row in rows for name in row.stored}


# by the module's name; checkpoints for transformers have other names for these
_STACKS: dict[str, dict[str, _Row]] = {
    ".mlp.switch_mlp.": _rows(
        _Row(".mlp.experts.gate_up_proj", "joined", ("gate_proj.weight", "up_proj.weight")),
        _Row(".mlp.experts.down_proj", "as stored", ("down_proj.weight",)),
    ),
    # Mixtral
    ".block_sparse_moe.switch_mlp.": _rows(
        _Row(".mlp.experts.gate_up_proj", "joined", ("gate_proj.weight", "up_proj.weight")),
        _Row(".mlp.experts.down_proj", "as stored", ("down_proj.weight",)),
    ),
    # GPT-OSS
    ".mlp.experts.": _rows(
        _Row(".mlp.experts.gate_up_proj", "alternating columns", ("gate_proj.weight", "up_proj.weight")),
        _Row(".mlp.experts.gate_up_proj_bias", "alternating", ("gate_proj.bias", "up_proj.bias")),
        _Row(".mlp.experts.down_proj", "transposed", ("down_proj.weight",)),
        _Row(".mlp.experts.down_proj_bias", "as stored", ("down_proj.bias",)),
    ),
    # DeepSeek: the two halves of one matrix, with that of keys transposed
    ".self_attn.": _rows(
        _Row(".self_attn.kv_b_proj.weight", "latents", ("embed_q.weight", "unembed_out.weight")),
    ),
}


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
        """Return the bytes of codes, scales and biases."""
        if self.shape[-1] % _CODES:
            return 0
        return sum(part.num_bytes for part in self.parts.values())

    @property
    def kept_form(self) -> str:
        """Return the name of the form."""
        return f"affine{self.bits}"

    def kept(self, parts: Parts) -> Stored | None:
        """Return the matrix over the codes, with rounded values for embeddings, or a stack of one for each
        expert.
        """
        import torch

        from convoy.model.kernels.stored.matrix import StoredMatrix, StoredRange
        from convoy.model.kernels.stored.weights import StoredStack

        # torch cannot index its unsigned words
        codes, scales, biases = parts["weight"].view(torch.int32), parts["scales"], parts["biases"]
        found = []
        num_rows, width = self.shape[-2:]
        rounded = "" if self.dtype == "float32" else self.dtype
        for lead in _leads(self.shape):
            own = {"codes": codes[lead], "scales": scales[lead], "biases": biases[lead]}
            one = StoredRange(self.kept_form, num_rows, width, own, self.group_size, rounded)
            found.append(StoredMatrix((one,)))
        return found[0] if len(self.shape) == 2 else StoredStack(tuple(found))


def describe_mlx(quantization: Quantization, tensors: Mapping[str, StoredTensor]) -> StoredLayout:
    """Describe a checkpoint. Raises ModelError naming the settings or tensors that do not fit together."""
    made = {}
    for name in tensors:
        if name.endswith(".scales"):
            whole = _quantised(quantization, tensors, name.removesuffix(".scales"))
            made[whole.name] = whole
    return StoredLayout({whole.name: whole for whole in _with_stacks(made, tensors)})


def _quantised(quantization: Quantization, tensors: Mapping[str, StoredTensor], module: str) -> Unpacking:
    quantization = _own_settings(quantization, module)
    mode = quantization.settings.get("mode") or "affine"
    if mode == "affine":
        return _affine(quantization, tensors, module)
    if mode not in ("mxfp4", "mxfp8", "nvfp4"):
        raise quantization.wrong("mode", "affine, mxfp4, mxfp8 or nvfp4")
    scales = tensors[f"{module}.scales"]
    weight = part_of(tensors, f"{module}.weight", scales.name)
    if mode == "nvfp4":
        return grouped_floats(weight.name, weight, scales, None)
    return (row_floats if mode == "mxfp4" else word_floats)(weight.name, weight, scales)


def _affine(quantization: Quantization, tensors: Mapping[str, StoredTensor], module: str) -> AffineRows:
    bits, group_size = _settings(quantization)
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
    # round embeddings as MLX does, as rows are looked up, and so the output that is tied to them; other
    # matrices are multiplied unrounded
    dtype = _LOOKED_UP[scales.dtype] if module.endswith("embed_tokens") else "float32"
    return AffineRows(
        weight.name,
        (*scales.shape[:-1], width),
        {"weight": weight, "scales": scales, "biases": biases},
        bits,
        group_size,
        dtype=dtype,
    )


def _own_settings(quantization: Quantization, module: str) -> Quantization:
    """Return the settings of one module, or those of all."""
    own = quantization.settings.get(module)
    if not isinstance(own, Mapping):
        return quantization
    return replace(quantization, settings=own, key=f"{quantization.key}.{module}")


def _settings(quantization: Quantization) -> tuple[int, int]:
    """Return bits and group size."""
    # mixed recipes of `mlx_lm` write null for what MLX then chooses
    found = {key: value for key, value in quantization.settings.items() if value is not None}
    reader = replace(quantization, settings=_USUAL | found).reader
    bits = reader.count("bits", most=32)
    if bits not in _BITS:
        raise quantization.wrong("bits", f"one of {', '.join(map(str, _BITS))}")
    return bits, reader.count("group_size", most=_MAX_GROUP)


def _with_stacks(made: Mapping[str, Unpacking], tensors: Mapping[str, StoredTensor]) -> Iterator[Unpacking]:
    """Yield all tensors that are not used as stored, with those of `_STACKS` under the library's names."""
    found = set()
    for name in tensors:
        for module, rows in _STACKS.items():
            prefix, _, rest = name.partition(module)
            row = rows.get(rest)
            if row is None:
                continue
            found.add(name)
            beside = [f"{prefix}{module}{part}" for part in row.stored]
            wholes = [_whole(made, tensors, part, name) for part in beside]
            if row.arrangement == "as stored":
                yield replace(wholes[0], name=prefix + row.target)
            elif name == beside[0]:
                yield arranged(prefix + row.target, row.arrangement, wholes, None)
    yield from (whole for name, whole in made.items() if name not in found)


def _whole(
    made: Mapping[str, Unpacking], tensors: Mapping[str, StoredTensor], name: str, beside: str
) -> Unpacking:
    whole = made.get(name)
    return plain(part_of(tensors, name, beside)) if whole is None else whole


def _leads(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if len(shape) == 2:
        yield ()
    else:
        yield from ((number,) for number in range(shape[0]))
