"""Make small matrices of every stored form, of random codes and scales, to compare kernels with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from convoy.model.kernels.stored.matrix import (
    CODE_VALUES,
    FORMS,
    GGUF,
    HALVES,
    OFFSET,
    PLACES,
    SCALE_VALUES,
    StoredRange,
    is_shared,
)

# The role, the dtype and the width of each part; the width of a part that all outputs share is 0.
PartWidths = tuple[tuple[str, torch.dtype, int], ...]
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# The bits of bytes of which all ones mark a NaN or an infinity.
_NOT_FINITE = {"F8_E4M3": 0x7F, "F8_E5M2": 0x7C}


@dataclass(frozen=True)
class Shape:
    """Describe a range by all that its kernel depends on."""

    form: str
    inputs: int
    group: int
    parts: PartWidths
    rounded: str = ""

    @classmethod
    def of(cls, one: StoredRange) -> Shape:
        """Return the shape of a range."""
        widths = [
            (role, part.dtype, 0 if is_shared(role) else part.shape[1])
            for role, part in sorted(one.parts.items())
        ]
        return cls(one.form, one.inputs, one.group, tuple(widths), one.rounded)


def usual_shape(word: str, inputs: int) -> Shape:
    """Return the shape of a usual matrix in a form.

    ``word`` is one of `KEPT_FORMS`: a form, and the parts that it may have or not.
    """
    form, *more = word.split(" ")
    if form.startswith(GGUF):
        kind = FORMS[form]
        return Shape(form, inputs, 0, (("stored", torch.uint8, inputs // kind.block * kind.block_bytes),))
    found = _plain_shapes(inputs).get(form)
    if found is None:
        bits, groups = int(form[-1]), inputs // 64
        dtype = torch.bfloat16 if form.startswith("affine") else torch.float16
        parts: PartWidths = (("codes", torch.uint8, inputs * bits // 8), ("scales", dtype, groups))
        if form.startswith("affine"):
            parts = (("biases", dtype, groups), *parts)
        found = Shape(form, inputs, 64, parts)
    groups = next((width for role, _, width in found.parts if role == "scales"), 0)
    added: dict[str, tuple[str, torch.dtype, int]] = {
        "zeros": ("zeros", torch.int8 if form == "I8" else torch.uint8, groups),
        "places": (PLACES, torch.int32, 0),
    }
    return replace(found, parts=(*found.parts, *(added[one] for one in more)))


def _plain_shapes(inputs: int) -> dict[str, Shape]:
    """Return the shapes of the forms whose names have no width of codes."""
    floats = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    eights = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
    pairs = ("codes", torch.uint8, inputs // 2)
    found = {form: Shape(form, inputs, 0, (("values", dtype, inputs),)) for form, dtype in floats.items()}
    for form, dtype in eights.items():
        parts: PartWidths = (("scales", torch.float32, -(-inputs // 128)), ("values", dtype, inputs))
        found[form] = Shape(form, inputs, 128, parts)
    of_rows: PartWidths = (("scales", torch.float32, 1), ("values", torch.int8, inputs))
    exponents: PartWidths = (pairs, ("scales", torch.uint8, inputs // 32))
    looked_up: PartWidths = (pairs, (SCALE_VALUES, torch.float32, 0), ("scales", torch.uint8, inputs // 16))
    doubly: PartWidths = (
        *((CODE_VALUES, torch.float32, 0), pairs, (OFFSET, torch.float32, 0)),
        *(
            ("outers", torch.float32, 1),
            (SCALE_VALUES, torch.float32, 0),
            ("scales", torch.uint8, inputs // 64),
        ),
    )
    return {
        **found,
        "I8": Shape("I8", inputs, 0, of_rows),
        "MXFP4": Shape("MXFP4", inputs, 32, exponents),
        "NVFP4": Shape("NVFP4", inputs, 16, looked_up),
        "NF4": Shape("NF4", inputs, 64, doubly, "bfloat16"),
    }


def sample_range(shape: Shape, outputs: int) -> StoredRange:
    """Return a range [outputs, inputs] of finite values. A shape has the same numbers on every machine."""
    generator = torch.Generator().manual_seed(20)
    groups = max(width for role, _, width in shape.parts if role in ("scales", "values", "stored"))
    sizes = {PLACES: shape.inputs, CODE_VALUES: 16, SCALE_VALUES: 256, OFFSET: 1}
    made: dict[str, torch.Tensor] = {}
    for role, dtype, width in shape.parts:
        size = (sizes[role],) if is_shared(role) else (outputs, width)
        # A normal distribution would depend on the machine's logarithm.
        numbers = torch.randint(-(1 << 22), 1 << 22, size, generator=generator).to(torch.float32) * 2.0**-21
        raw = torch.randint(
            0, 256, (*size[:-1], size[-1] * dtype.itemsize), dtype=torch.uint8, generator=generator
        )
        if role == PLACES:
            made[role] = (torch.arange(shape.inputs) * 7 % groups).to(dtype)
        elif role == "stored":
            made[role] = _with_halves(shape.form, raw, numbers)
        elif dtype in _FLOATS:
            made[role] = numbers.to(dtype)
        elif shape.form == "MXFP4" and role == "scales":
            made[role] = raw.clamp_(100, 150).view(dtype)
        elif shape.form in _NOT_FINITE and role == "values":
            mask = _NOT_FINITE[shape.form]
            made[role] = raw.where(raw.bitwise_and(mask) != mask, 0).view(dtype)
        else:
            made[role] = raw.view(dtype)
    return StoredRange(shape.form, outputs, shape.inputs, made, shape.group, shape.rounded)


def _with_halves(form: str, raw: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return raw blocks with numbers of common sizes in place of their halves."""
    name = form.removeprefix(GGUF)
    raw = raw.view(len(raw), -1, FORMS[form].block_bytes)
    if name == "MXFP4":
        raw[..., 0] = raw[..., 0].clamp(100, 150)
    if name == "IQ1_M":
        # The highest bits of a half that lies in four parts.
        raw[..., 55] = raw[..., 55].bitwise_and(0x8F).bitwise_or(0x30)
    for place in HALVES.get(name, ()):
        halves = numbers[:, : raw.shape[1]].to(torch.float16).contiguous()
        raw[..., place : place + 2] = halves.view(torch.uint8).view(*raw.shape[:2], 2)
    return raw.flatten(1)
