"""Unpack bitsandbytes' nf4: codes of 4 bits in blocks of a flattened matrix, each with its largest magnitude.

``X.weight`` has two codes a byte, the first in the upper half, and ``X.weight.absmax`` has a number for each
block. With double quantisation these are codes of ``nested_quant_map``, whose blocks have ``nested_absmax``.
A small JSON object beside them has the matrix's shape. Values are rounded to the dtype that it names, as
bitsandbytes does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from convoy.errors import ModelError
from convoy.model.checkpoints.checkpoint import StoredTensor, map_tensor
from convoy.model.checkpoints.formats.unpacking import (
    Index,
    Parts,
    StoredLayout,
    Unpacking,
    part_of,
    require,
)
from convoy.plan.spec.config import ConfigReader
from convoy.plan.spec.quantization import Quantization

if TYPE_CHECKING:
    import torch

    from convoy.model.kernels.stored.weights import Stored

_STATE = ".quant_state.bitsandbytes__nf4"
_MAX_STATE_BYTES = 4096
_MAX_BLOCK = 1 << 16
_MAX_SIZE = 1 << 20
# of the tables of codes, and of scales with the offset
_CODES_BYTES, _TABLE_BYTES = 4 * 16, 4 * 256 + 4
# inputs under one outer scale of a row: with fewer, these add more than a sixteenth
_LEAST_UNDER_OUTER = 128
_DTYPES = ("float32", "bfloat16", "float16")
# of other types, which are refused
_OTHERS = (".quant_state.bitsandbytes__fp4", ".SCB")


@dataclass(frozen=True)
class BlockCodes(Unpacking):
    """Unpack ``weight`` by ``codes``, with ``scales`` for each ``block`` of the flattened matrix.

    With "of_scales" and "outer" among the parts, scales are codes in blocks of ``outer_block``, to which
    ``offset`` is added.
    """

    block: int
    outer_block: int = 0
    offset: float = 0.0

    def pieces(self, parts: Parts) -> Iterator[tuple[Index, torch.Tensor]]:
        """Yield rows. Rows are unpacked from whole blocks."""
        import torch

        num_rows, width = self.shape
        packed, scales = parts["weight"].flatten(), self._scales(parts)
        # rows together that begin at a block and at a byte
        step = math.lcm(self.block, 2, width) // width
        for rows in self.row_slices(num_rows, width, step):
            start, stop = rows.start * width, rows.stop * width
            own = packed[start // 2 : -(-stop // 2)]
            codes = torch.stack((own >> 4, own & 15), -1).flatten()[: stop - start]
            values = parts["codes"][codes.to(torch.int64)]
            of_blocks = scales[start // self.block : -(-stop // self.block)]
            spread = of_blocks.repeat_interleave(self.block)[: stop - start]
            yield (rows,), (values * spread).view(-1, width)

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of codes and scales, of outer scales for each row, and of tables.

        They are 0 where a block has inputs of two rows, or where rows share few outer scales.
        """
        num_rows, width = self.shape
        if width % self.block or width % 2:
            return 0
        blocks = width // self.block
        codes = num_rows * width // 2 + _CODES_BYTES
        if not self.outer_block:
            return codes + 4 * num_rows * blocks
        each = math.gcd(blocks, self.outer_block)
        if each * self.block < _LEAST_UNDER_OUTER:
            return 0
        return codes + num_rows * (blocks + 4 * blocks // each) + _TABLE_BYTES

    def kept(self, parts: Parts) -> Stored | None:
        """Return the matrix over codes and scales."""
        import torch

        from convoy.model.kernels.stored.matrix import (
            CODE_VALUES,
            OFFSET,
            SCALE_VALUES,
            StoredMatrix,
            StoredRange,
        )

        num_rows, width = self.shape
        blocks = width // self.block
        found = {
            "codes": parts["weight"].reshape(num_rows, -1),
            "scales": parts["scales"].view(num_rows, blocks),
            CODE_VALUES: parts["codes"],
        }
        if "outer" in parts:
            each = math.gcd(blocks, self.outer_block)
            of_outer = torch.arange(0, num_rows * blocks, each) // self.outer_block
            found["outers"] = parts["outer"][of_outer].view(num_rows, -1)
            found[SCALE_VALUES] = parts["of_scales"]
            found[OFFSET] = torch.tensor([self.offset])
        rounded = "" if self.dtype == "float32" else self.dtype
        return StoredMatrix((StoredRange("NF4", num_rows, width, found, self.block, rounded),))

    def _scales(self, parts: Parts) -> torch.Tensor:
        import torch

        if "outer" not in parts:
            return parts["scales"]
        scales = parts["of_scales"][parts["scales"].to(torch.int64)]
        outer = parts["outer"].repeat_interleave(self.outer_block)[: len(scales)]
        return scales * outer + self.offset


def describe_bitsandbytes(quantization: Quantization, tensors: Mapping[str, StoredTensor]) -> StoredLayout:
    """Describe a checkpoint. Raises ModelError naming settings or tensors that do not fit together."""
    if not quantization.reader.flag("load_in_4bit"):
        raise quantization.wrong("load_in_4bit", "true: 8 bits are not read")
    kind = quantization.settings.get("bnb_4bit_quant_type", "fp4")
    if kind != "nf4" or any(name.endswith(_OTHERS) for name in tensors):
        raise quantization.wrong("bnb_4bit_quant_type", "nf4")
    made: dict[str, Unpacking] = {}
    states: set[str] = set()
    for name, state in tensors.items():
        if name.endswith(_STATE):
            whole = _block_codes(tensors, name.removesuffix(_STATE), state)
            made[whole.name] = whole
            states.add(name)
    return StoredLayout(made, frozenset(states))


def _block_codes(tensors: Mapping[str, StoredTensor], name: str, state: StoredTensor) -> BlockCodes:
    reader = ConfigReader(_read_state(state), f"{state.path}: {state.name}", place="the state")
    shape = reader.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(_is_size(size) for size in shape):
        raise reader.wrong("shape", shape, "the sizes of a matrix")
    block, dtype = reader.count("blocksize", most=_MAX_BLOCK), reader.word("dtype")
    if dtype not in _DTYPES:
        raise reader.wrong("dtype", dtype, f"one of {', '.join(_DTYPES)}")
    num = shape[0] * shape[1]
    num_bytes, num_blocks = -(-num // 2), -(-num // block)
    parts = {
        "weight": require(part_of(tensors, name, state.name), ("U8",), (num_bytes, 1), (num_bytes,)),
        "codes": require(part_of(tensors, f"{name}.quant_map", state.name), ("F32",), (16,)),
    }
    scales = part_of(tensors, f"{name}.absmax", state.name)
    outer_block, offset = 0, 0.0
    if scales.dtype == "U8":
        outer_block = reader.count("nested_blocksize", most=_MAX_BLOCK)
        offset = _offset(reader)
        outer = part_of(tensors, f"{name}.nested_absmax", state.name)
        codes = part_of(tensors, f"{name}.nested_quant_map", state.name)
        parts["outer"] = require(outer, ("F32",), (-(-num_blocks // outer_block),))
        parts["of_scales"] = require(codes, ("F32",), (256,))
    parts["scales"] = require(scales, ("F32", "U8"), (num_blocks,))
    return BlockCodes(name, (shape[0], shape[1]), parts, block, outer_block, offset, dtype=str(dtype))


def _offset(reader: ConfigReader) -> float:
    offset = reader.get("nested_offset")
    if isinstance(offset, bool) or not isinstance(offset, int | float) or not math.isfinite(offset):
        raise reader.wrong("nested_offset", offset, "a number")
    return float(offset)


def _is_size(size: object) -> bool:
    return type(size) is int and 1 <= size <= _MAX_SIZE


def _read_state(state: StoredTensor) -> dict[str, object]:
    require(state, ("U8",))
    if not 2 <= state.num_bytes <= _MAX_STATE_BYTES:
        raise ModelError(
            f"{state.path}: {state.name} has {state.num_bytes} bytes, expected at most {_MAX_STATE_BYTES}"
        )
    try:
        found = json.loads(bytes(map_tensor(state).numpy()))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{state.path}: {state.name} is not JSON") from error
    if not isinstance(found, dict):
        raise ModelError(f"{state.path}: {state.name} holds a {type(found).__name__}, expected an object")
    return found
