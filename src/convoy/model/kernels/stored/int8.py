"""Multiply packed ranges by rows rounded to 8 bits, with compiled code that has the bits of `integers`."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from convoy.errors import SelfCheckError
from convoy.model.kernels.native.choice import choose_library
from convoy.model.kernels.native.library import NativeLibrary, native_libraries
from convoy.model.kernels.stored.integers import ROUNDED_GROUP, int8_product, integers_of
from convoy.model.kernels.stored.matrix import GGUF, DeferredRange, StoredRange
from convoy.model.kernels.stored.packed import NativeStored, PackedRange, fused_kind, pack_unchecked
from convoy.model.kernels.stored.sample import Shape, sample_range, usual_shape

# The kinds of `ranges.h` with products of whole numbers in `int8.c`.
_KINDS = frozenset(
    {
        *("NIBBLES", "CENTRED", "NIBBLES_ADD", "NIBBLES_LESS", "FIVES", "FIVES_ADD"),
        *("SIGNED", "BYTES_ADD", "Q4_K", "Q5_K", "Q6_K"),
    }
)
# Usual forms of each kind: all are compared when a machine is examined.
SAMPLES = (
    *("affine4", "affine8", "centred4", "centred4 zeros", "centred8", "I8", "MXFP4"),
    *(f"{GGUF}{name}" for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")),
    *(f"{GGUF}{name}" for name in ("IQ4_NL", "MXFP4")),
)
# Inputs of a check: some groups, and more than the tiles of a panel hold, with a rest.
_SAMPLE_INPUTS = (512, 4096 + 256)
# Of a check: two panels, and rows for each kind of pass.
_OUTPUTS, _ROW_COUNTS = 70, (1, 2, 3, 4, 6, 7, 13)


def rounds_inputs(one: StoredRange | DeferredRange) -> bool:
    """Return whether ranges of this form and shape have products of whole numbers."""
    sample = one if isinstance(one, StoredRange) else one.sample
    found = fused_kind(sample)
    if found is None or sample.inputs % ROUNDED_GROUP:
        return False
    kind, group = found
    return kind in _KINDS and group % ROUNDED_GROUP == 0


class NativeInt8(NativeStored):
    """Compute x W^T + b over packed ranges, with rows rounded to 8 bits, for any number of rows."""

    def __init__(
        self,
        ranges: Sequence[tuple[int, PackedRange]],
        bias: torch.Tensor | None,
        library: NativeLibrary | None = None,
    ) -> None:
        """Take ranges of the same inputs, with the place of their first output in a row.

        ``library`` multiplies; None means the one that packed them. All libraries read the same panels.
        """
        super().__init__(ranges, bias)
        self.library = library or self.library
        self._rounded = self.library.convoy_int8_linear

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Write the outputs of the ranges, as `NativeStored` does. Raises MemoryError."""
        done = self._rounded(
            *(self._reference, x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), x.shape[0]),
            torch.get_num_threads(),
        )
        if not done:
            raise MemoryError(f"there is no memory for {len(x)} rows of 8 bits")


@functools.cache
def int8_holds(library: NativeLibrary, shape: Shape) -> bool:
    """Return whether a library's products of whole numbers have the bits of `int8_product`."""
    one = sample_range(shape, _OUTPUTS)
    generator = torch.Generator().manual_seed(21)
    bias = torch.randn(_OUTPUTS, generator=generator)
    x = torch.randn(max(_ROW_COUNTS), shape.inputs, generator=generator)
    # Groups of many sizes, one of zeros, and numbers that lie between two whole ones.
    x *= torch.logspace(-3, 3, shape.inputs // ROUNDED_GROUP).repeat_interleave(ROUNDED_GROUP)
    x[1, :ROUNDED_GROUP] = 0
    x[2, :ROUNDED_GROUP] = torch.arange(ROUNDED_GROUP) - 0.5
    x[2, 0] = 127
    expected = int8_product(x, integers_of(one), bias)
    native = NativeInt8([(0, pack_unchecked(one, library))], bias)
    for num_rows in _ROW_COUNTS:
        found = torch.empty(num_rows, _OUTPUTS)
        native(x[:num_rows], found)
        if not torch.equal(found, expected[:num_rows]):
            return False
    return True


def int8_library(shape: Shape, offered: Sequence[NativeLibrary] | None = None) -> NativeLibrary:
    """Return the first library whose products of whole numbers have the bits of `int8_product`.

    A warning says once which code is refused. ``offered`` is as `choose_library` takes it. Raises
    SelfCheckError if no library has these bits.
    """

    def holds(library: NativeLibrary) -> bool:
        return int8_holds(library, shape)

    found = choose_library(f"8-bit products of {shape.form}", holds, offered, may_lack=True)
    if found is None:
        tried = native_libraries() if offered is None else offered
        names = " and ".join(library.instruction_set.name for library in tried)
        raise SelfCheckError(
            f"the compiled 8-bit products of {names} have other bits here for the form {shape.form}",
            hint="leave out --compute int8",
        )
    return found


def failing_int8(library: NativeLibrary) -> list[str]:
    """Return the usual forms of which a library's products of whole numbers have other bits."""
    return [
        form
        for form in SAMPLES
        if not all(int8_holds(library, usual_shape(form, inputs)) for inputs in _SAMPLE_INPUTS)
    ]
