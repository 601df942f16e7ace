"""Write a safetensors checkpoint of a synthetic model in the layout of MLX, GPTQ, AWQ or compressed-tensors.

As in `blocks`, codes are random and one scale stands for all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from convoy.bench.forms.blocks import E2M1_SQUARE, level
from convoy.errors import ModelError
from convoy.model.checkpoints.checkpoint import DTYPES
from convoy.model.checkpoints.names import is_matrix
from convoy.model.checkpoints.read_tensor import read_tensor
from convoy.model.checkpoints.source import ModelSource
from convoy.model.quantize.shards import PlannedTensor, ShardWriter

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """Describe a tensor that stands for a matrix [outputs, inputs].

    ``fill`` gives its values for the matrix's spread. Without it all bits are random.
    """

    suffix: str
    dtype: str
    shape: Callable[[int, int], Shape]
    fill: Callable[[Shape, float], torch.Tensor] | None = None


@dataclass(frozen=True)
class CodeLayout:
    """Describe a checkpoint: the parts of a matrix, and the settings in config.json under ``key``.

    A row's inputs must be a multiple of ``group``. ``ends`` says whether embedding and `lm_head` are codes
    too; else they have 16 bits.
    """

    parts: tuple[Part, ...]
    key: str
    settings: Mapping[str, Any]
    group: int = 1
    ends: bool = False


def _full(dtype: str, value: Callable[[float], float]) -> Callable[[Shape, float], torch.Tensor]:
    def fill(shape: Shape, spread: float) -> torch.Tensor:
        import torch

        return torch.full(shape, value(spread), dtype=getattr(torch, DTYPES[dtype][0]))

    return fill


def _words(word: int) -> Callable[[Shape, float], torch.Tensor]:
    """Return a filler with the same 32 bits everywhere."""
    return _full("I32", lambda _: word - (1 << 32 if word >> 31 else 0))


def _groups(size: int) -> Callable[[Shape, float], torch.Tensor]:
    def fill(shape: Shape, _: float) -> torch.Tensor:
        import torch

        return torch.arange(shape[0], dtype=torch.int32) // size

    return fill


def _finite_floats(shape: Shape, _: float) -> torch.Tensor:
    """Return random E4M3 numbers without NaN."""
    import torch

    raw = torch.from_numpy(np.random.Generator(np.random.Philox(2)).integers(0, 256, shape, np.uint8))
    return raw.where((raw & 0x7F) != 0x7F, 0).view(torch.float8_e4m3fn)


def mlx(bits: int, group: int = 64) -> CodeLayout:
    """Return the layout of `mlx_lm.convert`: unsigned codes in words, a scale and a bias for each group."""
    scale, middle = level(1 << bits), ((1 << bits) - 1) / 2
    parts = (
        Part(".weight", "U32", lambda rows, width: (rows, width * bits // 32)),
        Part(
            ".scales",
            "BF16",
            lambda rows, width: (rows, width // group),
            _full("BF16", lambda spread: scale * spread),
        ),
        Part(
            ".biases",
            "BF16",
            lambda rows, width: (rows, width // group),
            _full("BF16", lambda spread: -middle * scale * spread),
        ),
    )
    return CodeLayout(parts, "quantization", {"group_size": group, "bits": bits}, group, ends=True)


def _exponent(spread: float) -> float:
    """Return the exponent, with its offset of 127, at which random E2M1 numbers come near the spread."""
    return 127 + round(math.log2(spread / math.sqrt(E2M1_SQUARE)))


MLX_MXFP4 = CodeLayout(
    (
        Part(".weight", "U32", lambda rows, width: (rows, width // 8)),
        Part(".scales", "U8", lambda rows, width: (rows, width // 32), _full("U8", _exponent)),
    ),
    "quantization",
    {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    group=32,
    ends=True,
)
_HALF_SCALES = _full("F16", lambda spread: level(16) * spread)
GPTQ = CodeLayout(
    (
        Part(".qweight", "I32", lambda rows, width: (width // 8, rows)),
        # The middle of 16 levels, less one.
        Part(".qzeros", "I32", lambda rows, width: (width // 128, rows // 8), _words(0x77777777)),
        Part(".scales", "F16", lambda rows, width: (width // 128, rows), _HALF_SCALES),
        Part(".g_idx", "I32", lambda _, width: (width,), _groups(128)),
    ),
    "quantization_config",
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    group=128,
)
AWQ = CodeLayout(
    (
        Part(".qweight", "I32", lambda rows, width: (width, rows // 8)),
        Part(".qzeros", "I32", lambda rows, width: (width // 128, rows // 8), _words(0x88888888)),
        Part(".scales", "F16", lambda rows, width: (width // 128, rows), _HALF_SCALES),
    ),
    "quantization_config",
    {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    group=128,
)
# The root of the mean square of E4M3's finite numbers, all equally likely.
_E4M3_SPREAD = 100.1
FP8 = CodeLayout(
    (
        Part(".weight", "F8_E4M3", lambda rows, width: (rows, width), _finite_floats),
        Part(
            ".weight_scale",
            "F32",
            lambda rows, _: (rows, 1),
            _full("F32", lambda spread: spread / _E4M3_SPREAD),
        ),
    ),
    "quantization_config",
    {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 8,
                    "type": "float",
                    "symmetric": True,
                    "strategy": "channel",
                    "group_size": None,
                },
            }
        },
        "ignore": ["lm_head"],
    },
)


def write_codes(source: ModelSource, folder: Path, layout: CodeLayout) -> None:
    """Write config.json and weights of a synthetic model, with one tensor in memory at a time.

    Raises ModelError for rows that fill no groups, and for a tensor that cannot be drawn.
    """
    planned: dict[str, list[PlannedTensor]] = {}
    for name, stored in source.tensors.items():
        is_coded = is_matrix(name, stored.shape) and (layout.ends or name.startswith("model.layers."))
        planned[name] = _planned(name, stored.shape, layout) if is_coded else []
    plain = [PlannedTensor(name, "BF16", source.tensors[name].shape) for name in planned if not planned[name]]
    rng = np.random.Generator(np.random.Philox(1))
    with closing(ShardWriter(folder, [*plain, *(one for own in planned.values() for one in own)])) as writer:
        for name, own in planned.items():
            if not own:
                writer.write(name, _rounded(source, name))
            spread = 1 / math.sqrt(source.tensors[name].shape[-1])
            for part, tensor in zip(layout.parts, own, strict=False):
                writer.write(tensor.name, _values(part, tensor, spread, rng))
        writer.finish()
    config = {**source.config, "dtype": "bfloat16", layout.key: dict(layout.settings)}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _planned(name: str, shape: Shape, layout: CodeLayout) -> list[PlannedTensor]:
    module = name.removesuffix(".weight")
    rows, width = shape
    if width % layout.group:
        raise ModelError(f"{name} has rows of {width} numbers, expected a multiple of {layout.group}")
    return [PlannedTensor(module + part.suffix, part.dtype, part.shape(rows, width)) for part in layout.parts]


def _rounded(source: ModelSource, name: str) -> torch.Tensor:
    import torch

    return read_tensor(source, name).to(torch.bfloat16)


def _values(part: Part, tensor: PlannedTensor, spread: float, rng: np.random.Generator) -> torch.Tensor:
    import torch

    if part.fill is not None:
        return part.fill(tensor.shape, spread)
    random = torch.from_numpy(np.frombuffer(rng.bytes(tensor.num_bytes), np.uint8).copy())
    return random.view(getattr(torch, DTYPES[tensor.dtype][0])).view(tensor.shape)
