"""Hold a float matrix in the form of the model's file: codes and scales, and no float32 copy.

A matrix is a list of ranges of outputs, and each range has a form of its own. So one matrix may join q, k
and v of several forms. `FORMS` has one row for each form. A row unpacks in the order of operations of the
format's reader, so every value is the reader's, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from convoy.errors import ModelError
from convoy.model.kernels.stored.bits import stream_codes

# The part that has one number for each input.
PLACES = "places"
# Parts that all outputs share: numbers that codes, and scales in bytes, are looked up in, and one that is
# added to such scales. All other parts have one row for each output.
CODE_VALUES, SCALE_VALUES, OFFSET = "code_values", "scale_values", "offset"
_SHARED_SIZES = {CODE_VALUES: 16, SCALE_VALUES: 256, OFFSET: 1}
# Forms of ggml have this before ggml's own name of the type.
GGUF = "gguf:"
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# The values of E2M1: the highest bit of a code is the sign.
E2M1 = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
E8M0_BIAS = 127
# Where a half of each type of ggml lies in a block. Others have exponents in bytes, or scales of other kinds.
HALVES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "IQ4_XS", "IQ1_S"), (0,)),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
# Numbers unpacked at a time: 16 MiB of float32.
_PIECE_ELEMENTS = 1 << 22


@dataclass(frozen=True, eq=False)
class StoredRange:
    """Describe consecutive outputs in one form.

    ``parts`` have one row for each output, except "places" [inputs], the group of each input where groups
    are not runs, and tables for all outputs. A scale is shared by ``group`` inputs, or by all of them if
    ``group`` is 0. Values are ``rounded`` to a dtype by torch's name, or not if that is empty.
    """

    form: str
    outputs: int
    inputs: int
    parts: Mapping[str, torch.Tensor]
    group: int = 0
    rounded: str = ""

    def rows(self, index: slice | torch.Tensor) -> StoredRange:
        """Return the outputs of a slice or of an index tensor."""
        parts = {role: part if is_shared(role) else part[index] for role, part in self.parts.items()}
        return replace(self, outputs=len(_row_part(parts)), parts=parts)

    def columns(self, start: int, stop: int) -> StoredRange:
        """Return the inputs [start, stop). Raises ModelError where that cuts a block."""
        step = self._step()
        if start % step or (stop % step and stop != self.inputs):
            raise ModelError(
                f"a matrix in the form {self.form} cannot be cut into inputs {start} to {stop}: "
                f"its blocks have {step} inputs"
            )
        parts = {role: self._cut(role, part, start, stop) for role, part in self.parts.items()}
        return replace(self, inputs=stop - start, parts=parts)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all parts."""
        return sum(part.nbytes for part in self.parts.values())

    def unpack(self) -> torch.Tensor:
        """Return all values, float32 [outputs, inputs]."""
        values = FORMS[self.form].unpack(self)
        return values.to(getattr(torch, self.rounded)).to(torch.float32) if self.rounded else values

    def values(self, index: slice | torch.Tensor) -> torch.Tensor:
        """Return the values of some outputs, float32 [n, inputs]."""
        return self.rows(index).unpack()

    def has_numbers(self) -> bool:
        """Return whether all scales are finite, and numbers that are added to products."""
        floats = [part for role, part in self.parts.items() if role in _FACTORS and part.is_floating_point()]
        places = HALVES.get(self.form.removeprefix(GGUF), ())
        if places:
            blocks = self.parts["stored"].view(self.outputs, -1, FORMS[self.form].block_bytes)
            floats += [blocks[..., place : place + 2].contiguous().view(torch.float16) for place in places]
        return all(bool(torch.isfinite(part).all()) for part in floats)

    def _step(self) -> int:
        form = FORMS[self.form]
        has_groups = self.group and any(
            part.dim() > 1 and part.shape[1] > 1 for part in _scale_parts(self.parts)
        )
        if has_groups and PLACES not in self.parts:
            outers = self.parts["outers"].shape[1] if "outers" in self.parts else 1
            step = self.group if outers == 1 else self.inputs // outers
            return step if step % form.block == 0 else step * form.block
        return form.block

    def _cut(self, role: str, part: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        if role == PLACES:
            return part[start:stop]
        if role in _SHARED_SIZES:
            return part
        if role in _OF_GROUPS:
            if part.shape[1] == 1 or PLACES in self.parts:
                return part
            return part[:, start // self.group : -(-stop // self.group)]
        width = part.shape[1]
        return part[:, start * width // self.inputs : -(-stop * width // self.inputs)]


@dataclass(frozen=True, eq=False)
class DeferredRange:
    """Describe outputs in a form whose codes and scales are made as they are packed.

    So no more than some outputs exist beside the packed ones. ``make`` returns the range of some outputs of
    a whole matrix, for int64 ids [n], with all inputs. The range has the outputs ``ids`` and the inputs
    [start, stop) of it. ``like`` is one output with all inputs, in the form and with parts of the dtypes and
    widths of all outputs; its numbers have no meaning.
    """

    make: Callable[[torch.Tensor], StoredRange]
    like: StoredRange
    ids: torch.Tensor
    start: int
    stop: int

    @property
    def outputs(self) -> int:
        """Return the number of outputs."""
        return len(self.ids)

    @property
    def inputs(self) -> int:
        """Return the number of inputs."""
        return self.stop - self.start

    @property
    def sample(self) -> StoredRange:
        """Return ``like`` with the inputs of this range."""
        return self.like.columns(self.start, self.stop)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all parts once they are made."""
        return self.outputs * self.sample.num_bytes

    def rows(self, index: slice | torch.Tensor) -> DeferredRange:
        """Return the outputs of a slice or of an index tensor."""
        return replace(self, ids=self.ids[index])

    def columns(self, start: int, stop: int) -> DeferredRange:
        """Return the inputs [start, stop). Raises ModelError where that cuts a block."""
        self.sample.columns(start, stop)
        return replace(self, start=self.start + start, stop=self.start + stop)

    def made(self, index: slice | torch.Tensor) -> StoredRange:
        """Return some outputs with their codes and scales."""
        return self.make(self.ids[index]).columns(self.start, self.stop)

    def pieces(self, elements: int, step: int = 1) -> Iterator[tuple[int, StoredRange]]:
        """Yield all outputs, about ``elements`` weights at a time, each piece with its first output.

        A piece has a multiple of ``step`` outputs, except the last.
        """
        at_once = max(1, elements // max(1, self.inputs * step)) * step
        for start in range(0, self.outputs, at_once):
            yield start, self.made(slice(start, start + at_once))

    def values(self, index: slice | torch.Tensor) -> torch.Tensor:
        """Return the values of some outputs, float32 [n, inputs]."""
        return self.made(index).unpack()


@dataclass(frozen=True)
class StoredForm:
    """Describe a form: its unpacking, and the inputs and bytes of one block of codes."""

    unpack: Callable[[StoredRange], torch.Tensor]
    block: int
    block_bytes: int
    # The part with the codes.
    codes: str = "codes"


@dataclass(frozen=True, eq=False)
class StoredMatrix:
    """Describe a float matrix [outputs, inputs] by its stored ranges. Its tensors are never written."""

    ranges: tuple[StoredRange | DeferredRange, ...]
    shape: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        inputs = {one.inputs for one in self.ranges}
        if len(inputs) != 1:
            raise ModelError(f"a matrix of ranges with {sorted(inputs)} inputs, expected one number")
        for one in self.ranges:
            if isinstance(one, StoredRange):
                _require_parts(one)
        object.__setattr__(self, "shape", (sum(one.outputs for one in self.ranges), inputs.pop()))

    @classmethod
    def joined(cls, matrices: Sequence[StoredMatrix]) -> StoredMatrix:
        """Return matrices of the same inputs as one, with their outputs one after the other."""
        return cls(tuple(one for matrix in matrices for one in matrix.ranges))

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all parts."""
        return sum(one.num_bytes for one in self.ranges)

    def rows(self, index: slice | torch.Tensor) -> StoredMatrix:
        """Return the outputs of a slice with step 1, or of an index tensor [n], in that order."""
        if isinstance(index, slice):
            start, stop, step = index.indices(self.shape[0])
            assert step == 1, "take an index tensor for other orders"
            found = [
                one.rows(slice(max(0, start - first), min(one.outputs, stop - first)))
                for first, one in self._placed()
                if start < first + one.outputs and first < stop
            ]
            return StoredMatrix(tuple(found))
        return StoredMatrix(tuple(one.rows(rows) for one, rows in self._runs(index)))

    def columns(self, inputs: slice) -> StoredMatrix:
        """Return the inputs of a slice with step 1. Raises ModelError where that cuts a block."""
        start, stop, step = inputs.indices(self.shape[1])
        assert step == 1, "inputs stay in order"
        return StoredMatrix(tuple(one.columns(start, stop) for one in self.ranges))

    def dense(self) -> torch.Tensor:
        """Return all values, float32 [outputs, inputs]."""
        whole = torch.empty(self.shape)
        for rows, values in self.pieces():
            whole[rows] = values
        return whole

    def pieces(self, elements: int = _PIECE_ELEMENTS) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield consecutive slices of outputs and their values, about ``elements`` at a time."""
        at_once = max(1, elements // max(1, self.shape[1]))
        for first, one in self._placed():
            for start in range(0, one.outputs, at_once):
                stop = min(start + at_once, one.outputs)
                yield slice(first + start, first + stop), one.values(slice(start, stop))

    def row_values(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the values of some outputs, float32 [n, inputs], for int64 ``ids`` [n]."""
        found = torch.empty(len(ids), self.shape[1])
        for first, one in self._placed():
            own = ((ids >= first) & (ids < first + one.outputs)).nonzero().flatten()
            if len(own):
                found[own] = one.values(ids[own] - first)
        return found

    def _placed(self) -> Iterator[tuple[int, StoredRange | DeferredRange]]:
        """Yield each range with its first output."""
        first = 0
        for one in self.ranges:
            yield first, one
            first += one.outputs

    def _runs(self, index: torch.Tensor) -> Iterator[tuple[StoredRange | DeferredRange, torch.Tensor]]:
        """Yield runs of ``index`` inside one range, and the rows in it."""
        ends = torch.tensor([first + one.outputs for first, one in self._placed()])
        of_range = torch.bucketize(index.contiguous(), ends, right=True)
        numbers, counts = torch.unique_consecutive(of_range, return_counts=True)
        placed, done = list(self._placed()), 0
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            first, one = placed[number]
            yield one, index[done : done + count] - first
            done += count


# Parts with a number for each group of inputs.
_OF_GROUPS = ("scales", "biases", "zeros")
_FACTORS = ("scales", "biases", "outers")


def is_shared(role: str) -> bool:
    """Return whether all outputs share a part."""
    return role == PLACES or role in _SHARED_SIZES


def _scale_parts(parts: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    return [parts[role] for role in _OF_GROUPS if role in parts]


def _row_part(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return next(part for role, part in parts.items() if not is_shared(role))


def _require_parts(one: StoredRange) -> None:
    """Raise ModelError for an unknown form, or for parts of other shapes than the range's.

    Compiled code takes addresses, and would read outside a part of another shape.
    """
    form = FORMS.get(one.form)
    if form is None:
        raise ModelError(f"{one.form!r} is no form of a stored matrix")
    if one.inputs % form.block:
        raise ModelError(f"the form {one.form} has blocks of {form.block}, and a row has {one.inputs} inputs")
    groups = -(-one.inputs // one.group) if one.group else 1
    for role, part in one.parts.items():
        if is_shared(role):
            fits = tuple(part.shape) == (_SHARED_SIZES.get(role, one.inputs),)
        else:
            fits = part.dim() == 2 and part.shape[0] == one.outputs
        if fits and role == form.codes:
            fits = part.shape[1] * part.element_size() == one.inputs // form.block * form.block_bytes
        elif fits and role == "outers":
            fits = groups % part.shape[1] == 0
        elif fits and not is_shared(role) and PLACES not in one.parts:
            fits = part.shape[1] in {1, groups}
        if not fits:
            raise ModelError(
                f"the {role} of a matrix in the form {one.form} have the shape {list(part.shape)}, "
                f"for {one.outputs} outputs and {one.inputs} inputs"
            )
    if PLACES in one.parts and not _names_groups(one):
        raise ModelError(f"a matrix in the form {one.form} has inputs in groups that it does not have")
    if form.codes not in one.parts:
        raise ModelError(f"a matrix in the form {one.form} has no {form.codes}")


def _names_groups(one: StoredRange) -> bool:
    """Return whether each input's group is among those of all scales."""
    num_groups = min((part.shape[1] for part in _scale_parts(one.parts)), default=0)
    places = one.parts[PLACES]
    return int(places.min()) >= 0 and int(places.max()) < num_groups


def _floats(one: StoredRange) -> torch.Tensor:
    return one.parts["values"].to(torch.float32)


def _gguf(one: StoredRange) -> torch.Tensor:
    # The reader of GGUF files refuses them by name where the package is not installed.
    import gguf

    kind = gguf.GGMLQuantizationType[one.form.removeprefix(GGUF)]
    found = gguf.quants.dequantize(one.parts["stored"].numpy(), kind)
    return torch.from_numpy(found)


def _affine(one: StoredRange, bits: int) -> torch.Tensor:
    """Return scale * code + bias, rounded twice."""
    codes = stream_codes(one.parts["codes"], bits)[:, : one.inputs].to(torch.float32)
    codes *= _spread(one, "scales")
    return codes.add_(_spread(one, "biases"))


def _centred(one: StoredRange, bits: int) -> torch.Tensor:
    """Return (code - zero) * scale; without zeros of its own sign, half of the codes' range is zero."""
    codes = stream_codes(one.parts["codes"], bits)[:, : one.inputs].to(torch.float32)
    if "zeros" not in one.parts or one.parts["zeros"].dtype == torch.int8:
        codes -= float(1 << (bits - 1))
    if "zeros" in one.parts:
        codes -= _spread(one, "zeros")
    return codes.mul_(_spread(one, "scales"))


def _scaled(one: StoredRange) -> torch.Tensor:
    """Return (number - zero) * scale for 8-bit floats and whole numbers."""
    values = one.parts["values"].to(torch.float32)
    if "zeros" in one.parts:
        values -= _spread(one, "zeros")
    return values.mul_(_spread(one, "scales"))


def _spread(one: StoredRange, role: str) -> torch.Tensor:
    """Return a number for each input, float32 [outputs, inputs], or [outputs, 1] for all inputs alike."""
    of_group = one.parts[role].to(torch.float32)
    if PLACES in one.parts:
        return of_group[:, one.parts[PLACES].to(torch.int64)]
    if of_group.shape[1] == 1:
        return of_group
    return of_group.repeat_interleave(one.group, 1)[:, : one.inputs]


def _mxfp4(one: StoredRange) -> torch.Tensor:
    """Return E2M1 codes times a power of two for each 32 (OCP Microscaling Formats 1.0)."""
    found = torch.tensor(E2M1)[stream_codes(one.parts["codes"], 4).to(torch.int64)]
    exponents = one.parts["scales"].view(torch.uint8).to(torch.int32) - E8M0_BIAS
    return torch.ldexp(found.view(one.outputs, -1, 32), exponents.unsqueeze(-1)).flatten(1)


def _nvfp4(one: StoredRange) -> torch.Tensor:
    """Return E2M1 codes times the number of each scale's byte, for 16 inputs."""
    found = torch.tensor(E2M1)[stream_codes(one.parts["codes"], 4).to(torch.int64)]
    scales = one.parts[SCALE_VALUES][one.parts["scales"].to(torch.int64)]
    return found.mul_(scales.repeat_interleave(one.group, 1))


def _nf4(one: StoredRange) -> torch.Tensor:
    """Return bitsandbytes' values: the first code of a byte is in its upper half.

    A scale in a byte is the code of a number, multiplied by an outer scale, to which an offset is added.
    """
    packed, scales = one.parts["codes"], one.parts["scales"]
    codes = torch.stack((packed >> 4, packed & 15), -1).flatten(-2)
    if "outers" in one.parts:
        outers = one.parts["outers"]
        spread = outers.repeat_interleave(scales.shape[1] // outers.shape[1], 1)
        scales = one.parts[SCALE_VALUES][scales.to(torch.int64)] * spread + one.parts[OFFSET]
    return one.parts[CODE_VALUES][codes.to(torch.int64)] * scales.repeat_interleave(one.group, 1)


# The inputs and bytes of a block of ggml's types.
_GGUF_BLOCKS = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "MXFP4": (32, 17),
    "NVFP4": (64, 36),
    "IQ1_S": (256, 50),
    "IQ1_M": (256, 56),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98),
    "IQ3_S": (256, 110),
}
FORMS: dict[str, StoredForm] = {
    "F32": StoredForm(_floats, 1, 4, "values"),
    **dict.fromkeys(("F16", "BF16"), StoredForm(_floats, 1, 2, "values")),
    **{f"{GGUF}{name}": StoredForm(_gguf, *block, "stored") for name, block in _GGUF_BLOCKS.items()},
    # Parts: "codes" in words or bytes, the lowest bits first; "scales", and "biases" or optional "zeros".
    **{f"affine{bits}": StoredForm(partial(_affine, bits=bits), 8, bits) for bits in (2, 3, 4, 5, 6, 8)},
    **{f"centred{bits}": StoredForm(partial(_centred, bits=bits), 8, bits) for bits in (2, 4, 8)},
    # Parts: "values" of one byte each, "scales" and optional "zeros".
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8"), StoredForm(_scaled, 1, 1, "values")),
    # Parts: "codes" of two to a byte, the lower first, and "scales", exponents in bytes.
    "MXFP4": StoredForm(_mxfp4, 32, 16),
    # The same with bytes of "scales" that are looked up in "scale_values".
    "NVFP4": StoredForm(_nvfp4, 16, 8),
    # Parts: "codes" of two to a byte, the upper first, looked up in "code_values"; "scales" of float32, or
    # of bytes under "outers", "scale_values" and "offset".
    "NF4": StoredForm(_nf4, 2, 1),
}
