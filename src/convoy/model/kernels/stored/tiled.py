"""Describe the forms that compiled code unpacks a tile at a time, for any number of rows.

Codes of 2 to 8 bits go into panels, so that vectors unpack them. Blocks of ggml that are looked up in grids
lie in memory as in the file.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from convoy.model.kernels.native.library import StoredCodesStruct, StoredSourceStruct
from convoy.model.kernels.stored.matrix import (
    CODE_VALUES,
    E2M1,
    GGUF,
    OFFSET,
    PLACES,
    SCALE_VALUES,
    StoredRange,
)

# The numbers of the enums of `ranges.h`.
_SCALED, _LESS_SCALED, _SCALED_ADD, _SCALED_LESS = range(4)
_ROUNDED = ("", "bfloat16", "float16")
_TYPES = (torch.float16, torch.bfloat16, torch.float32, None, torch.uint8, torch.int8)
_IN_TABLE = 6
_BLOCKS = ("", "Q2_K", "Q3_K", "IQ4_XS", "TQ2_0", "NVFP4")
_GRIDS = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0")
# Of each form of blocks: the bits of a code, the inputs of a group, and the code of zero.
_OF_BLOCKS = {
    "Q2_K": (2, 16, 0),
    "Q3_K": (3, 16, 4),
    "IQ4_XS": (4, 32, 0),
    "TQ2_0": (2, 256, 1),
    "NVFP4": (4, 16, 0),
}
_E2M1_VALUES = torch.tensor(E2M1)
_FLOATS = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


@dataclass(frozen=True)
class Tiled:
    """Describe a range for the kinds CODES and GRIDS of `ranges.h`.

    ``codes``, ``scales`` and ``seconds`` are roles of its parts; "" stands for none.
    """

    kind: str
    bits: int
    group: int
    codes: str = "codes"
    scales: str = ""
    seconds: str = ""
    how: int = _SCALED
    # The numbers of the types of scales and of second numbers.
    types: tuple[int, int] = (0, 0)
    centre: int = 0
    blocks: int = 0
    # Exclusive-ored with each byte; and whether its halves are exchanged.
    flip: int = 0
    swaps: bool = False
    # Tables that compiled code reads: "values", "scale_values", "places".
    tables: Mapping[str, torch.Tensor] = field(default_factory=dict)
    num_groups: int = 1
    num_outers: int = 0
    offset: float = 0.0
    rounded: str = ""

    def struct(self, inputs: int) -> StoredCodesStruct:
        """Return what `StoredCodes` of `ranges.h` has. It points into ``tables``."""
        tables = (self.tables.get(role) for role in ("values", "scale_values", PLACES))
        return StoredCodesStruct(
            *(None if table is None else table.data_ptr() for table in tables),
            *(self.bits, inputs, self.centre, self.how, self.blocks, _ROUNDED.index(self.rounded)),
            *(self.num_groups, self.num_outers, (ctypes.c_float * 2)(self.offset, 0)),
        )

    def source(self, one: StoredRange) -> tuple[StoredSourceStruct, list[torch.Tensor]]:
        """Return the addresses and strides of the parts, and the tensors that they point into."""
        roles = (self.codes, self.scales, self.seconds)
        held = [one.parts[role].contiguous() if role else None for role in roles]
        places = [None if part is None else part.data_ptr() for part in held]
        strides = [0 if part is None else part.nbytes // one.outputs for part in held]
        steps = (number for stride in strides for number in (stride, 0))
        source = StoredSourceStruct(*places, None, *steps, int(self.swaps), self.flip)
        return source, [part for part in held if part is not None]


def tiled_form(one: StoredRange) -> Tiled | None:
    """Return how a range is unpacked by tiles, or None if compiled code does not know its form and parts."""
    try:
        if one.form.startswith(GGUF):
            return _of_ggml(one.form.removeprefix(GGUF))
        return _of_codes(one)
    except ValueError:
        # A part has a dtype that compiled code does not read.
        return None


def _of_ggml(name: str) -> Tiled | None:
    if name in _GRIDS:
        tables = {} if name == "TQ1_0" else {"values": _grid(name)}
        return Tiled("GRIDS", 8, 256, "stored", blocks=_GRIDS.index(name), tables=tables)
    if name not in _OF_BLOCKS:
        return None
    bits, group, centre = _OF_BLOCKS[name]
    how = _SCALED_LESS if name == "Q2_K" else _SCALED
    scale = _IN_TABLE if name == "NVFP4" else 0
    return Tiled(
        *("CODES", bits, group, "stored"),
        how=how,
        types=(scale, 0),
        centre=centre,
        blocks=_BLOCKS.index(name),
        tables=_ggml_tables(name),
    )


def _of_codes(one: StoredRange) -> Tiled | None:
    """Return the description of a form with scales, and biases or zeros."""
    parts, form = one.parts, one.form
    bits = 8 if form in {*_FLOATS, "I8"} else 4 if form in {"NVFP4", "NF4", "MXFP4"} else int(form[-1:] or 0)
    if "scales" not in parts or form == "MXFP4":
        return None
    seconds = next((role for role in ("biases", "zeros", "outers") if role in parts), "")
    scale = _IN_TABLE if SCALE_VALUES in parts else _TYPES.index(parts["scales"].dtype)
    second = _TYPES.index(parts[seconds].dtype) if seconds else 0
    how, centre, tables = _SCALED, 0, {}
    if form.startswith("affine"):
        how = _SCALED_ADD
    elif form.startswith("centred") or form == "I8":
        how = _LESS_SCALED if seconds else _SCALED
        centre = 0 if seconds and parts[seconds].dtype == torch.uint8 else 1 << (bits - 1)
    elif form in _FLOATS:
        tables["values"] = _every_float(form)
    if form == "NVFP4":
        tables["values"] = _E2M1_VALUES
    elif form == "NF4":
        tables["values"] = _owned(CODE_VALUES, parts[CODE_VALUES])
    elif bits == 4:
        tables["values"] = _counted(centre)
    for role in (SCALE_VALUES, PLACES):
        if role in parts:
            tables[role] = _owned(role, parts[role])
    num_groups = parts["scales"].shape[1]
    return Tiled(
        *("CODES", bits, one.group if num_groups > 1 else one.inputs),
        codes="codes" if "codes" in parts else "values",
        scales="scales",
        seconds=seconds,
        how=how,
        types=(scale, second),
        centre=centre,
        flip=128 if form == "I8" else 0,
        swaps=form == "NF4",
        tables=tables,
        num_groups=num_groups,
        num_outers=parts["outers"].shape[1] if "outers" in parts else 0,
        offset=float(parts[OFFSET]) if OFFSET in parts else 0.0,
        rounded=one.rounded,
    )


def _owned(role: str, table: torch.Tensor) -> torch.Tensor:
    """Return a table in memory of its own, in the dtype that compiled code reads."""
    return table.to(torch.int32 if role == PLACES else torch.float32).clone().contiguous()


@functools.cache
def _counted(centre: int) -> torch.Tensor:
    """Return the values of codes of 4 bits around a zero, float32 [16]."""
    return torch.arange(16, dtype=torch.float32) - centre


@functools.cache
def _every_float(form: str) -> torch.Tensor:
    """Return the values of all bytes, float32 [256]."""
    return torch.arange(256).to(torch.uint8).view(_FLOATS[form]).to(torch.float32)


@functools.cache
def _ggml_tables(name: str) -> dict[str, torch.Tensor]:
    import gguf

    if name == "IQ4_XS":
        return {"values": torch.tensor(gguf.quants.IQ4_NL.kvalues, dtype=torch.float32)}
    if name == "NVFP4":
        every = torch.arange(256).to(torch.uint8).numpy()
        scales = torch.from_numpy(gguf.quants.NVFP4.ue4m3_to_fp32(every)).to(torch.float32)
        return {"values": torch.tensor(gguf.quants.NVFP4.kvalues, dtype=torch.float32), SCALE_VALUES: scales}
    return {}


@functools.cache
def _grid(name: str) -> torch.Tensor:
    """Return the rows of the grid of a type of ggml, one after the other."""
    import gguf

    kind = getattr(gguf.quants, name)
    kind.init_grid()
    return torch.from_numpy(kind.grid).to(torch.float32).flatten().clone()
