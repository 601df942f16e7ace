"""Pack stored ranges into panels of 64 outputs, and multiply by them with compiled kernels.

A panel keeps the file's codes and scales at their width, in the order in which the kernels read them. Each
kernel is compared with the reader's values and with `PackedLinear`, bit by bit, before it is used.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from convoy.config.kernels import KEPT_FORMS
from convoy.model.kernels.linear import PackedLinear, split_inputs
from convoy.model.kernels.native.library import (
    StoredLinearStruct,
    StoredRangeStruct,
    StoredSourceStruct,
    native_library,
)
from convoy.model.kernels.native.linears import run_length
from convoy.model.kernels.pages import empty_on_huge_pages
from convoy.model.kernels.stored.matrix import GGUF, PLACES, StoredRange

_log = logging.getLogger(__name__)

# The kinds and widths of numbers, in the order of the enums of `stored.c`.
_KINDS = (
    *("BF16", "F16", "NIBBLES", "NIBBLES_ADD", "NIBBLES_LESS", "FIVES", "FIVES_ADD"),
    *("SIGNED", "BYTES_ADD", "E4M3", "Q4_K", "Q5_K", "Q6_K"),
)
_TYPES = (torch.float16, torch.bfloat16, torch.float32)
_HALF_POWERS, _BYTES = 3, 4
_NIBBLES = frozenset({"NIBBLES", "NIBBLES_ADD", "NIBBLES_LESS"})
_PANEL = 64
# Outputs and rows of a check: two panels, and two passes of rows. Fewer rows than these are fused.
_CHECK_OUTPUTS, _CHECK_ROWS = 70, 13
_FUSED_ROWS = range(1, 7)
# Of a sample of each form.
_SAMPLE_INPUTS = 256
_E4M3_NAN = 0x7F
# The role, the dtype and the width of each part.
PartWidths = tuple[tuple[str, torch.dtype, int], ...]


@dataclass(frozen=True)
class _Blocks:
    """Describe ggml's blocks of ``size`` bytes: where codes, the scale and the second number lie in each."""

    inputs: int
    size: int
    codes: int
    second: int = 0
    # Where the fifth bits lie.
    fifths: int = 0


@dataclass(frozen=True)
class _Packing:
    """Describe how a form is packed: the kernel's kind, and the roles of its parts."""

    kind: str
    codes: str = "codes"
    second: str = ""
    # The values of codes of 4 or 5 bits.
    table: tuple[float, ...] = ()
    # A range of raw blocks has one part, "stored".
    blocks: _Blocks | None = None
    # The bytes whose low four bits come first, before their high ones; 0: they alternate.
    span: int = 0
    # Exclusive-ored with each byte.
    flip: int = 0
    # The type of the scales, if their dtype does not say it.
    scale: int = 0


_UNSIGNED, _CENTRED = tuple(map(float, range(16))), tuple(map(float, range(-8, 8)))
_FIVE_BITS = tuple(map(float, range(32)))
_TWICE_E2M1 = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
# ggml reads the negative zero of E2M1 as zero.
_GGML_E2M1 = (*_TWICE_E2M1, 0.0, *(-one for one in _TWICE_E2M1[1:]))
_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

# A form that is missing is unpacked by its reader, some outputs at a time.
_PACKINGS: dict[str, _Packing] = {
    "BF16": _Packing("BF16", codes="values"),
    "F16": _Packing("F16", codes="values"),
    "I8": _Packing("SIGNED", codes="values"),
    "F8_E4M3": _Packing("E4M3", codes="values"),
    "affine4": _Packing("NIBBLES_ADD", second="biases", table=_UNSIGNED),
    "affine8": _Packing("BYTES_ADD", second="biases"),
    "centred4": _Packing("NIBBLES", table=_CENTRED),
    "centred8": _Packing("SIGNED", flip=128),
    "MXFP4": _Packing("NIBBLES", table=(*_TWICE_E2M1, *(-one for one in _TWICE_E2M1)), scale=_HALF_POWERS),
    f"{GGUF}Q8_0": _Packing("SIGNED", blocks=_Blocks(32, 34, codes=2)),
    f"{GGUF}Q4_0": _Packing("NIBBLES", table=_CENTRED, blocks=_Blocks(32, 18, codes=2), span=16),
    f"{GGUF}Q4_1": _Packing(
        "NIBBLES_ADD", table=_UNSIGNED, blocks=_Blocks(32, 20, codes=4, second=2), span=16
    ),
    f"{GGUF}IQ4_NL": _Packing(
        "NIBBLES", table=tuple(map(float, _IQ4_NL)), blocks=_Blocks(32, 18, codes=2), span=16
    ),
    f"{GGUF}Q5_0": _Packing(
        "FIVES", table=tuple(map(float, range(-16, 16))), blocks=_Blocks(32, 22, codes=6, fifths=2), span=16
    ),
    f"{GGUF}Q5_1": _Packing(
        "FIVES_ADD", table=_FIVE_BITS, blocks=_Blocks(32, 24, codes=8, second=2, fifths=4), span=16
    ),
    f"{GGUF}MXFP4": _Packing(
        "NIBBLES", table=_GGML_E2M1, blocks=_Blocks(32, 17, codes=1), span=16, scale=_HALF_POWERS
    ),
    f"{GGUF}Q4_K": _Packing("Q4_K", table=_UNSIGNED, blocks=_Blocks(256, 144, codes=0, second=2)),
    f"{GGUF}Q5_K": _Packing("Q5_K", table=_FIVE_BITS, blocks=_Blocks(256, 176, codes=0, second=2)),
    f"{GGUF}Q6_K": _Packing("Q6_K", blocks=_Blocks(256, 210, codes=208)),
}
# The same with zeros.
_WITH_ZEROS = {"centred4": _Packing("NIBBLES_LESS", second="zeros", table=_UNSIGNED)}
_K_KINDS = frozenset({"Q4_K", "Q5_K", "Q6_K"})


class PackedRange:
    """Hold the outputs of one form in panels, in the layout of the compiled kernels."""

    def __init__(self, one: StoredRange, packing: _Packing) -> None:
        library = native_library()
        assert library is not None, "nothing is compiled here"
        self.outputs, self.inputs = one.outputs, one.inputs
        self._library = library
        self._table = torch.tensor(packing.table) if packing.table else None
        scale, second = _scale_types(one, packing)
        self.struct = StoredRangeStruct(
            *(None, None if self._table is None else self._table.data_ptr(), None),
            *(_KINDS.index(packing.kind), one.outputs, 0, _group(one, packing), scale, second, 0),
        )
        of = ctypes.byref(self.struct)
        self.struct.panel_bytes = library.convoy_stored_panel_bytes(of, one.inputs)
        num_panels = -(-one.outputs // _PANEL)
        self._packed = empty_on_huge_pages(num_panels * self.struct.panel_bytes)
        self.struct.packed = self._packed.data_ptr()
        source, held = _source(one, packing)
        library.convoy_stored_pack(
            of, ctypes.byref(source), one.inputs, self._packed.data_ptr(), torch.get_num_threads()
        )
        del held

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the panels."""
        return self._packed.nbytes

    def values(self, rows: slice | torch.Tensor) -> torch.Tensor:
        """Return the values of outputs, float32 [n, inputs], for a slice with bounds or int64 ids [n]."""
        ids, start = (None, rows.start) if isinstance(rows, slice) else (rows.contiguous(), 0)
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        out = torch.empty(count, self.inputs)
        self._library.convoy_stored_unpack(
            *(ctypes.byref(self.struct), self.inputs, None if ids is None else ids.data_ptr()),
            *(start, count, out.data_ptr()),
        )
        return out


class NativeStored:
    """Compute x W^T + b over packed ranges, for any number of rows."""

    def __init__(
        self, ranges: Sequence[tuple[int, PackedRange]], runs: Sequence[int], bias: torch.Tensor | None
    ) -> None:
        """Take ranges with the place of their first output in a row of results."""
        library = native_library()
        assert library is not None, "nothing is compiled here"
        # Kept alive: the structs below have only their addresses.
        self._held = (ranges, bias)
        self._structs = (StoredRangeStruct * len(ranges))(*(one.struct for _, one in ranges))
        for struct, (first, _) in zip(self._structs, ranges, strict=True):
            struct.first = first
            struct.bias = None if bias is None else bias[first:].data_ptr()
        widths = split_inputs(ranges[0][1].inputs)
        none = [0] * (2 - len(widths))
        self.described = StoredLinearStruct(
            *(self._structs, len(ranges)),
            *((ctypes.c_int64 * 2)(*widths, *none), (ctypes.c_int64 * 2)(*runs, *none)),
        )
        self._reference = ctypes.byref(self.described)
        self._run = library.convoy_stored_linear

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Write the outputs of the ranges for x [rows, inputs] to y [rows, all outputs].

        The numbers of a row must be contiguous, and all of ``y``.
        """
        self._run(
            *(self._reference, x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), x.shape[0]),
            torch.get_num_threads(),
        )


def run_lengths(inputs: int, outputs: int) -> list[int]:
    """Return the run of each part of a linear, or [] where no length gives oneDNN's bits."""
    if native_library() is None:
        return []
    runs = [run_length(width, min(outputs, 2 * _PANEL)) for width in split_inputs(inputs)]
    return runs if all(runs) else []


def pack_range(one: StoredRange) -> PackedRange | None:
    """Return the packed form of a range.

    Returns None where nothing is compiled, where no kernel knows the form, and where the kernel's bits
    differ on this machine.
    """
    packing = _packing(one)
    if packing is None or not run_lengths(one.inputs, _CHECK_OUTPUTS):
        return None
    parts = tuple(
        (role, part.dtype, 1 if role == PLACES else part.shape[1]) for role, part in sorted(one.parts.items())
    )
    if not kernel_holds(one.form, one.inputs, one.group, parts):
        _log.warning("the compiled kernel of %s has other bits here, and is not used", one.form)
        return None
    return PackedRange(one, packing)


@functools.cache
def kernel_holds(form: str, inputs: int, group: int, parts: PartWidths) -> bool:
    """Return whether a form's kernel has the reader's values and the bits of `PackedLinear` here.

    ``parts`` are the role, the dtype and the width of each part.
    """
    one = sample_range(form, (_CHECK_OUTPUTS, inputs), group, parts)
    packing, runs = _packing(one), run_lengths(inputs, _CHECK_OUTPUTS)
    assert packing is not None, "a kernel is checked that is not there"
    generator = torch.Generator().manual_seed(20)
    bias = torch.randn(_CHECK_OUTPUTS, generator=generator)
    x = torch.randn(_CHECK_ROWS, inputs, generator=generator)
    packed, values = PackedRange(one, packing), one.unpack()
    if not torch.equal(packed.values(slice(0, _CHECK_OUTPUTS)), values):
        return False
    expected = PackedLinear(values, bias)(x)
    native = NativeStored([(0, packed)], runs, bias)
    for num_rows in (*_FUSED_ROWS, _CHECK_ROWS):
        found = torch.empty(num_rows, _CHECK_OUTPUTS)
        native(x[:num_rows], found)
        if not torch.equal(found, expected[:num_rows]):
            return False
    return True


def failing_forms() -> list[str]:
    """Return the forms that plans count as kept and that have no kernel with the right bits here.

    One small matrix of each form is compared, in some tens of milliseconds. A stage compares its own shapes.
    """
    if not run_lengths(_SAMPLE_INPUTS, _CHECK_OUTPUTS):
        return sorted(KEPT_FORMS)
    return [
        form
        for form in sorted(KEPT_FORMS)
        if not kernel_holds(form.partition(" ")[0], _SAMPLE_INPUTS, *part_widths(form, _SAMPLE_INPUTS))
    ]


def _packing(one: StoredRange) -> _Packing | None:
    """Return how a range is packed, or None if no kernel knows its form and parts."""
    packing = _PACKINGS.get(one.form)
    if "zeros" in one.parts:
        packing = _WITH_ZEROS.get(one.form)
    if packing is None or PLACES in one.parts:
        return None
    if packing.blocks is None and packing.kind not in {"BF16", "F16"}:
        try:
            _scale_types(one, packing)
        except ValueError:
            return None
        if packing.kind in _NIBBLES and (one.inputs % 8 or _group(one, packing) % 8):
            return None
    if packing.kind == "E4M3" and _has_e4m3_nan(one.parts["values"]):
        return None
    return packing


def _has_e4m3_nan(values: torch.Tensor) -> bool:
    """Return whether a NaN is among 8-bit floats. It looks at some rows at a time."""
    for start in range(0, len(values), 1024):
        rows = values[start : start + 1024].view(torch.uint8)
        if bool((rows.bitwise_and(_E4M3_NAN) == _E4M3_NAN).any()):
            return True
    return False


def _scale_types(one: StoredRange, packing: _Packing) -> tuple[int, int]:
    """Return the numbers of the types of scales and second numbers. Raises ValueError for others."""
    if packing.blocks is not None or "scales" not in one.parts:
        return packing.scale, 0
    scale = packing.scale or _TYPES.index(one.parts["scales"].dtype)
    if not packing.second:
        return scale, 0
    second = one.parts[packing.second].dtype
    return scale, _BYTES if second == torch.uint8 else _TYPES.index(second)


def _group(one: StoredRange, packing: _Packing) -> int:
    if packing.blocks is not None:
        return packing.blocks.inputs
    is_one = "scales" not in one.parts or one.parts["scales"].shape[1] == 1
    return one.inputs if is_one or not one.group else one.group


def _source(one: StoredRange, packing: _Packing) -> tuple[StoredSourceStruct, list[torch.Tensor]]:
    """Return the addresses and strides of a range's parts, and the tensors that they point into."""
    if packing.blocks is not None:
        blocks, stored = packing.blocks, one.parts["stored"].contiguous()
        first, row = stored.data_ptr(), stored.shape[1]
        codes = 0 if packing.kind in _K_KINDS else blocks.codes
        steps = (row, blocks.size) * 3
        place = (first + codes, first, first + blocks.second, first + blocks.fifths)
        return StoredSourceStruct(*place, *steps, packing.span, packing.flip), [stored]
    held = [one.parts[packing.codes].contiguous()]
    group = _group(one, packing)
    strides = [held[0].nbytes // one.outputs, held[0].nbytes // one.outputs * group // one.inputs]
    for role in ("scales", packing.second):
        if role and role in one.parts:
            held.append(one.parts[role].contiguous())
            strides += [held[-1].nbytes // one.outputs, held[-1].element_size()]
    place_of = [part.data_ptr() for part in held]
    none = 3 - len(held)
    return (
        StoredSourceStruct(
            *place_of, *[None] * (none + 1), *strides, *[0, 0] * none, packing.span, packing.flip
        ),
        held,
    )


def part_widths(form: str, inputs: int) -> tuple[int, PartWidths]:
    """Return the inputs of a group and the parts of a usual matrix in one of `KEPT_FORMS`."""
    kind, _, zeros = form.partition(" ")
    blocks, bits = _PACKINGS[kind].blocks, 8 if kind.endswith("8") else 4
    if blocks is not None:
        return 0, (("stored", torch.uint8, inputs // blocks.inputs * blocks.size),)
    plain: dict[str, tuple[int, PartWidths]] = {
        "BF16": (0, (("values", torch.bfloat16, inputs),)),
        "F16": (0, (("values", torch.float16, inputs),)),
        "I8": (0, (("scales", torch.float32, 1), ("values", torch.int8, inputs))),
        "F8_E4M3": (128, (("scales", torch.float32, inputs // 128), ("values", torch.float8_e4m3fn, inputs))),
        "MXFP4": (32, (("codes", torch.uint8, inputs // 2), ("scales", torch.uint8, inputs // 32))),
    }
    if kind in plain:
        return plain[kind]
    groups, dtype = inputs // 64, torch.bfloat16 if kind.startswith("affine") else torch.float16
    parts: PartWidths = (("codes", torch.uint8, inputs * bits // 8), ("scales", dtype, groups))
    if kind.startswith("affine"):
        parts = (("biases", dtype, groups), *parts)
    return 64, (*parts, ("zeros", torch.uint8, groups)) if zeros else parts


def sample_range(form: str, shape: tuple[int, int], group: int, parts: PartWidths) -> StoredRange:
    """Return a range [outputs, inputs] of random codes and scales, with parts of these dtypes and widths."""
    generator, (outputs, inputs) = torch.Generator().manual_seed(20), shape
    made: dict[str, torch.Tensor] = {}
    for role, dtype, width in parts:
        numbers = torch.randn(outputs, width, generator=generator)
        size = (outputs, width * dtype.itemsize)
        raw = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
        if role == "stored":
            made[role] = _with_halves(_PACKINGS[form], raw, numbers)
        elif dtype in _TYPES:
            made[role] = numbers.to(dtype)
        elif form == "MXFP4" and role == "scales":
            made[role] = raw.clamp_(100, 150).view(dtype)
        elif form == "F8_E4M3" and role == "values":
            made[role] = raw.where(raw.bitwise_and(_E4M3_NAN) != _E4M3_NAN, 0).view(dtype)
        else:
            made[role] = raw.view(dtype)
    return StoredRange(form, outputs, inputs, made, group)


def _with_halves(packing: _Packing, raw: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return raw blocks with numbers of common sizes in place of their halves."""
    blocks = packing.blocks
    assert blocks is not None, "raw rows have blocks"
    raw = raw.view(len(raw), -1, blocks.size)
    if packing.scale == _HALF_POWERS:
        raw[..., 0] = raw[..., 0].clamp(100, 150)
        return raw.flatten(1)
    places = {blocks.second, blocks.codes} if packing.kind in _K_KINDS else {0, blocks.second}
    for place in places:
        halves = numbers[:, : raw.shape[1]].to(torch.float16).contiguous()
        raw[..., place : place + 2] = halves.view(torch.uint8).view(*raw.shape[:2], 2)
    return raw.flatten(1)
