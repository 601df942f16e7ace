"""Pack stored ranges into panels of 64 outputs, and multiply by them with compiled kernels.

A panel keeps the file's codes and scales at their width, in the order in which the kernels read them. The
kernel of float32 is compared with slow sums in the written order (docs/exact.md), bit by bit. The kernels of
all other forms, and oneDNN, are compared with it before they are used.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from convoy.config.kernels import KEPT_FORMS
from convoy.model.kernels.linear import PackedLinear, packed_available, split_inputs
from convoy.model.kernels.native.choice import choose_library
from convoy.model.kernels.native.library import (
    NativeLibrary,
    StoredLinearStruct,
    StoredRangeStruct,
    StoredSourceStruct,
    native_libraries,
)
from convoy.model.kernels.native.linears import run_length
from convoy.model.kernels.pages import empty_on_huge_pages
from convoy.model.kernels.stored.bits import IQ4_NL, TWICE_E2M1
from convoy.model.kernels.stored.matrix import GGUF, PLACES, DeferredRange, StoredRange, is_shared
from convoy.model.kernels.stored.sample import Shape, sample_range, usual_shape
from convoy.model.kernels.stored.tiled import Tiled, tiled_form
from convoy.model.kernels.stored.weights import MADE_ELEMENTS

# The kinds and widths of numbers, in the order of the enums of `ranges.h`.
_KINDS = (
    *("F32", "BF16", "F16", "NIBBLES", "CENTRED", "NIBBLES_ADD", "NIBBLES_LESS"),
    *("FIVES", "FIVES_ADD", "SIGNED", "BYTES_ADD", "E4M3", "Q4_K", "Q5_K", "Q6_K"),
    *("CODES", "GRIDS"),
)
_TYPES = (torch.float16, torch.bfloat16, torch.float32)
_HALF_POWERS, _BYTES = 3, 4
_FLOATS = frozenset({"F32", "BF16", "F16"})
_NIBBLES = frozenset({"NIBBLES", "CENTRED", "NIBBLES_ADD", "NIBBLES_LESS"})
_PANEL = 64
# Kinds that add to a product of scale and code with one rounding.
_FUSED_SUMS = frozenset({"NIBBLES_ADD", "NIBBLES_LESS"})
# Outputs and rows of a check: two panels, and two passes of rows. Fewer rows than these are fused.
_CHECK_OUTPUTS, _CHECK_ROWS = 70, 13
_FUSED_ROWS = range(1, 7)
# Of a sample of each form.
_SAMPLE_INPUTS = 256
# Inputs of the checks of float32: two parts, and two runs.
_FLOAT_INPUTS = (201, 1100)
_E4M3_NAN = 0x7F


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
# ggml reads the negative zero of E2M1 as zero.
_GGML_E2M1 = (*TWICE_E2M1[:8], 0.0, *TWICE_E2M1[9:])

# The forms with kernels that unpack in registers.
_PACKINGS: dict[str, _Packing] = {
    "F32": _Packing("F32", codes="values"),
    "BF16": _Packing("BF16", codes="values"),
    "F16": _Packing("F16", codes="values"),
    "I8": _Packing("SIGNED", codes="values"),
    "F8_E4M3": _Packing("E4M3", codes="values"),
    "affine4": _Packing("NIBBLES_ADD", second="biases", table=_UNSIGNED),
    "affine8": _Packing("BYTES_ADD", second="biases"),
    "centred4": _Packing("CENTRED", table=_CENTRED),
    "centred8": _Packing("SIGNED", flip=128),
    "MXFP4": _Packing("NIBBLES", table=TWICE_E2M1, scale=_HALF_POWERS),
    f"{GGUF}Q8_0": _Packing("SIGNED", blocks=_Blocks(32, 34, codes=2)),
    f"{GGUF}Q4_0": _Packing("CENTRED", table=_CENTRED, blocks=_Blocks(32, 18, codes=2), span=16),
    f"{GGUF}Q4_1": _Packing(
        "NIBBLES_ADD", table=_UNSIGNED, blocks=_Blocks(32, 20, codes=4, second=2), span=16
    ),
    f"{GGUF}IQ4_NL": _Packing("NIBBLES", table=IQ4_NL, blocks=_Blocks(32, 18, codes=2), span=16),
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

    def __init__(
        self, whole: StoredRange | DeferredRange, packing: _Packing | Tiled, library: NativeLibrary
    ) -> None:
        """Pack a range for the functions of ``library``."""
        self.outputs, self.inputs, self.library = whole.outputs, whole.inputs, library
        one = whole if isinstance(whole, StoredRange) else whole.sample
        # Kept alive, as the numbers in `struct` are addresses: of a table, or of codes and their tables.
        self._table = torch.tensor(packing.table) if isinstance(packing, _Packing) and packing.table else None
        self._tiled = packing if isinstance(packing, Tiled) else None
        self._shared_bytes = sum(part.nbytes for role, part in one.parts.items() if is_shared(role))
        self._codes = None if self._tiled is None else self._tiled.struct(one.inputs)
        group, types = (
            (packing.group, packing.types)
            if isinstance(packing, Tiled)
            else (_group(one, packing), _scale_types(one, packing))
        )
        self.struct = StoredRangeStruct(
            *(None, None if self._table is None else self._table.data_ptr(), None),
            *(_KINDS.index(packing.kind), whole.outputs, 0, group, *types, 0),
            None if self._codes is None else ctypes.addressof(self._codes),
        )
        of = ctypes.byref(self.struct)
        self.struct.panel_bytes = library.convoy_stored_panel_bytes(of, one.inputs)
        num_panels = -(-whole.outputs // _PANEL)
        self._packed = empty_on_huge_pages(num_panels * self.struct.panel_bytes)
        self.struct.packed = self._packed.data_ptr()
        pieces = [(0, whole)] if isinstance(whole, StoredRange) else whole.pieces(MADE_ELEMENTS, _PANEL)
        for first, piece in pieces:
            self._pack(first, piece, packing)

    def _pack(self, first: int, one: StoredRange, packing: _Packing | Tiled) -> None:
        """Pack outputs from the output ``first`` on, with which a panel begins."""
        source, held = packing.source(one) if isinstance(packing, Tiled) else _source(one, packing)
        struct = StoredRangeStruct.from_buffer_copy(self.struct)
        struct.outputs = one.outputs
        place = self._packed.data_ptr() + first // _PANEL * struct.panel_bytes
        self.library.convoy_stored_pack(
            ctypes.byref(struct), ctypes.byref(source), one.inputs, place, torch.get_num_threads()
        )
        del held

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the panels, and of tables that belong to this range alone."""
        return self._packed.nbytes + self._shared_bytes

    def values(self, rows: slice | torch.Tensor) -> torch.Tensor:
        """Return the values of outputs, float32 [n, inputs], for a slice with bounds or int64 ids [n]."""
        ids, start = (None, rows.start) if isinstance(rows, slice) else (rows.contiguous(), 0)
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        out = torch.empty(count, self.inputs)
        self.library.convoy_stored_unpack(
            *(ctypes.byref(self.struct), self.inputs, None if ids is None else ids.data_ptr()),
            *(start, count, out.data_ptr()),
        )
        return out


class NativeStored:
    """Compute x W^T + b over packed ranges, for any number of rows."""

    def __init__(self, ranges: Sequence[tuple[int, PackedRange]], bias: torch.Tensor | None) -> None:
        """Take ranges of the same inputs and library, with the place of their first output in a row."""
        # Kept alive: the structs below have only their addresses.
        self._held = (ranges, bias)
        self._structs = (StoredRangeStruct * len(ranges))(*(one.struct for _, one in ranges))
        for struct, (first, _) in zip(self._structs, ranges, strict=True):
            struct.first = first
            struct.bias = None if bias is None else bias[first:].data_ptr()
        widths = split_inputs(ranges[0][1].inputs)
        none = [0] * (2 - len(widths))
        runs = map(run_length, widths)
        self.described = StoredLinearStruct(
            *(self._structs, len(ranges)),
            *((ctypes.c_int64 * 2)(*widths, *none), (ctypes.c_int64 * 2)(*runs, *none)),
        )
        self._reference = ctypes.byref(self.described)
        self.library = ranges[0][1].library
        self._run = self.library.convoy_stored_linear

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Write the outputs of the ranges for x [rows, inputs] to y [rows, all outputs].

        The numbers of a row must be contiguous, and all of ``y``.
        """
        self._run(
            *(self._reference, x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), x.shape[0]),
            torch.get_num_threads(),
        )


def pack_range(
    whole: StoredRange | DeferredRange, offered: Sequence[NativeLibrary] | None = None
) -> PackedRange | None:
    """Return the packed form of a range, for the first library whose kernel has the right bits here.

    A deferred range is made as it is packed. Returns None where nothing is compiled, where no kernel knows
    the form, and where the bits of all kernels differ. ``offered`` is as `choose_library` takes it.
    """
    one = whole if isinstance(whole, StoredRange) else whole.sample
    packing = _packing(one)
    if packing is None:
        return None
    is_float, shape = packing.kind == "F32", Shape.of(one)

    def holds(library: NativeLibrary) -> bool:
        return floats_hold(library) and (is_float or kernel_holds(library, shape))

    library = choose_library(one.form, holds, offered)
    return None if library is None else PackedRange(whole, packing, library)


def pack_unchecked(one: StoredRange, library: NativeLibrary) -> PackedRange:
    """Return the packed form of a range with a known form, for a check of ``library``."""
    packing = _packing(one)
    assert packing is not None, "a kernel is checked that is not there"
    return PackedRange(one, packing, library)


def fused_kind(one: StoredRange) -> tuple[str, int] | None:
    """Return the kind of kernel that unpacks a range in registers, and the inputs that share a scale.

    Returns None if there is no such kernel.
    """
    packing = _fused_packing(one)
    return None if packing is None else (packing.kind, _group(one, packing))


def is_packed_block(whole: StoredRange | DeferredRange) -> bool:
    """Return whether a range has blocks of ggml that a kernel unpacks in registers."""
    packing = _fused_packing(whole) if isinstance(whole, StoredRange) else None
    return packing is not None and packing.blocks is not None


def float_library() -> NativeLibrary | None:
    """Return the first library here whose kernel of float32 adds in the written order, or None."""
    return next(filter(floats_hold, native_libraries()), None)


@functools.cache
def floats_hold(library: NativeLibrary) -> bool:
    """Return whether a library's kernel of float32 adds in the written order."""
    for inputs in _FLOAT_INPUTS:
        values, bias, x = _drawn(inputs)
        # With 8 bits of each input, products and sums are exact in float64 before they are rounded.
        x = x.to(torch.bfloat16).to(torch.float32)
        expected = add_in_order(x, values, bias)
        if not _has_bits(_float_range(values, library), bias, x, expected):
            return False
    return True


@functools.cache
def kernel_holds(library: NativeLibrary, shape: Shape) -> bool:
    """Return whether a form's kernel has the reader's values, and the bits of the kernel of float32."""
    one = sample_range(shape, _CHECK_OUTPUTS)
    packed, values = pack_unchecked(one, library), one.unpack()
    if not torch.equal(packed.values(slice(0, _CHECK_OUTPUTS)), values):
        return False
    _, bias, x = _drawn(shape.inputs)
    expected = torch.empty(_CHECK_ROWS, _CHECK_OUTPUTS)
    NativeStored([(0, _float_range(values, library))], bias)(x, expected)
    return _has_bits(packed, bias, x, expected)


@functools.cache
def onednn_holds(inputs: int, outputs: int) -> bool:
    """Return whether oneDNN's packed linear adds in the written order, or nothing compiled does either."""
    library = float_library()
    if library is None:
        return True
    if not packed_available():
        return False
    values, bias, x = _drawn(inputs, outputs)
    linear = PackedLinear(values, bias)
    linear.leave_native()
    return _has_bits(_float_range(values, library), bias, x, linear(x))


def add_in_order(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x W^T + b slowly, in the written order, for x [rows, inputs] and weight [outputs, inputs].

    A sum is rounded to float64 before it is rounded to float32. So the bits are those of fused
    multiply-adds where products have few bits.
    """
    columns, weights = x.double().t().unsqueeze(-1), weight.double().t().unsqueeze(1)
    total: torch.Tensor | None = None
    start = 0
    for width in split_inputs(x.shape[1]):
        for first in range(start, start + width, run_length(width)):
            chain = torch.zeros(len(x), len(weight))
            for k in range(first, min(first + run_length(width), start + width)):
                chain = chain.double().addcmul_(columns[k], weights[k]).float()
            total = chain if total is None else total + chain
        assert total is not None, "a part has inputs"
        if start == 0 and bias is not None:
            total = total + bias
        start += width
    assert total is not None, "a linear has inputs"
    return total


def _drawn(inputs: int, outputs: int = _CHECK_OUTPUTS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random weights [outputs, inputs], a bias and some rows of inputs."""
    generator = torch.Generator().manual_seed(20)
    shapes = ((outputs, inputs), (outputs,), (_CHECK_ROWS, inputs))
    values, bias, x = (torch.randn(shape, generator=generator) for shape in shapes)
    return values, bias, x


def _float_range(values: torch.Tensor, library: NativeLibrary) -> PackedRange:
    """Return float32 values [outputs, inputs], packed without a check."""
    outputs, inputs = values.shape
    one = StoredRange("F32", outputs, inputs, {"values": values})
    return PackedRange(one, _PACKINGS["F32"], library)


def _has_bits(packed: PackedRange, bias: torch.Tensor, x: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether a kernel gives these bits for few rows and for several passes."""
    native = NativeStored([(0, packed)], bias)
    for num_rows in (*_FUSED_ROWS, len(x)):
        found = torch.empty(num_rows, packed.outputs)
        native(x[:num_rows], found)
        if not torch.equal(found, expected[:num_rows]):
            return False
    return True


def failing_forms(offered: Sequence[NativeLibrary] | None = None) -> list[str]:
    """Return the forms that plans count as kept and that have no kernel with the right bits here.

    One small matrix of each form is compared, in about a second. A stage compares its own shapes. Types of
    ggml are left out without the package that reads them. ``offered`` is as `choose_library` takes it.
    """

    def holds(form: str) -> bool:
        shape = usual_shape(form, _SAMPLE_INPUTS)
        return any(
            floats_hold(library) and kernel_holds(library, shape)
            for library in (native_libraries() if offered is None else offered)
        )

    has_reader = importlib.util.find_spec("gguf") is not None
    return [
        form for form in sorted(KEPT_FORMS) if (has_reader or not form.startswith(GGUF)) and not holds(form)
    ]


def _packing(one: StoredRange) -> _Packing | Tiled | None:
    """Return how a range is packed, or None if compiled code does not know its form and parts."""
    return _fused_packing(one) or tiled_form(one)


def _fused_packing(one: StoredRange) -> _Packing | None:
    """Return how a range is packed for a kernel that unpacks in registers, or None without one."""
    if one.rounded:
        return None
    packing = _PACKINGS.get(one.form)
    if "zeros" in one.parts:
        packing = _WITH_ZEROS.get(one.form)
    if packing is None or PLACES in one.parts:
        return None
    if packing.blocks is None and packing.kind not in _FLOATS:
        try:
            _scale_types(one, packing)
        except ValueError:
            return None
        is_odd = packing.kind in _NIBBLES and (one.inputs % 8 or _group(one, packing) % 8)
        if is_odd or (packing.kind in _FUSED_SUMS and not _has_exact_products(one, packing)):
            return None
    if packing.kind == "E4M3" and _has_e4m3_nan(one.parts["values"]):
        return None
    return packing


def _has_exact_products(one: StoredRange, packing: _Packing) -> bool:
    """Return whether scales times codes, and times zeros, are float32 numbers that need no rounding."""
    zeros_fit = packing.kind != "NIBBLES_LESS" or one.parts[packing.second].dtype == torch.uint8
    return one.parts["scales"].dtype != torch.float32 and zeros_fit


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
