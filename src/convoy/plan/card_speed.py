"""Derive a CUDA card's speed with linears in a form from two rates that are measured in bfloat16.

A card's kernels for codes read memory at other rates than the product of bfloat16. `FORMS` has their times as
measured on one H200 (`bench/results/cuda-linears-h200-2026-11-24-b.json`; 4 and 8 bits of one row and 16 in
`cuda-4bit-h200-2026-11-28.json`), for matrices of 28,672 by 4,096, in 8 bits of 128,256 by 4,096.
Steps have overheads beside products, which were measured with steps of small models on the same card.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from convoy.plan.speed import FEW_ROWS, Speed

BFLOAT16_BYTES = 2
# Of a captured decode: the kernels of a layer beside its linears, and what small linears take beyond reading.
_LAYER_S = 20e-6
# The host's work, in times that it takes to start one operation of torch: a step's schedule, tables, sampling
# and text; the same of each further row; and a chunk's layer, which is not captured.
_STEP, _ROW, _CHUNK_LAYER = 140, 6.4, 112
_USUAL_START_S = 4e-6


@dataclass(frozen=True)
class FormTimes:
    """Hold the bytes of a weight, and a linear's time over that of bfloat16, by its rows."""

    weight_bytes: float
    # Of a lone row, of 16 rows, and of 2,048.
    lone: float
    few: float
    many: float


_FOUR, _EIGHT = FormTimes(0.53, 0.44, 0.71, 1.14), FormTimes(1.06, 0.53, 0.82, 1.16)
# With scales that are products of two.
_DOUBLE_FOUR, _DOUBLE_EIGHT = FormTimes(0.58, 0.67, 1.59, 1.25), FormTimes(1.08, 0.77, 1.63, 1.25)
# By the form of the file, or by what weights are rounded to.
FORMS: dict[str, FormTimes] = {
    **dict.fromkeys(("affine2", "affine3", "affine4", "centred2", "centred4", "rounded4"), _FOUR),
    **dict.fromkeys(("gguf:Q4_0", "gguf:Q4_1"), _FOUR),
    **dict.fromkeys(("affine5", "affine6", "affine8", "centred8", "I8", "rounded8"), _EIGHT),
    **dict.fromkeys(("gguf:Q8_0", "gguf:Q5_0", "gguf:Q5_1", "gguf:IQ4_NL", "gguf:MXFP4"), _EIGHT),
    **dict.fromkeys(("MXFP4", "NVFP4"), _EIGHT),
    "gguf:Q4_K": _DOUBLE_FOUR,
    **dict.fromkeys((f"gguf:{name}" for name in ("Q2_K", "Q3_K", "Q5_K", "Q6_K", "IQ4_XS")), _DOUBLE_EIGHT),
    "F8_E4M3": FormTimes(1.0, 0.86, 1.14, 1.17),
    # Rows are rounded too.
    "float8": FormTimes(1.0, 0.91, 0.67, 0.53),
}


def on_card(measured: Speed, form: str) -> Speed:
    """Return the speed of steps with linears in ``form``; "" or a form without a layout is bfloat16.

    ``measured`` has the rates of reading and multiplying in bfloat16, and in ``starts_s`` the time in which
    the host starts an operation.
    """
    start_s = measured.starts_s or _USUAL_START_S
    speed = replace(
        measured, layer_s=_LAYER_S, row_s=_ROW * start_s, step_s=_STEP * start_s,
        starts_s=_CHUNK_LAYER * start_s, cache_bytes_per_s=measured.read_bytes_per_s,
    )  # fmt: skip
    times = FORMS.get(form)
    if times is None:
        return speed
    # A product of few rows takes as long as reading in bfloat16.
    few_flop_per_s = 2 * FEW_ROWS / BFLOAT16_BYTES * measured.read_bytes_per_s / times.few
    return replace(
        speed,
        read_bytes_per_s=measured.read_bytes_per_s * times.weight_bytes / BFLOAT16_BYTES / times.lone,
        few_flop_per_s=few_flop_per_s,
        flop_per_s=measured.flop_per_s / times.many,
    )
