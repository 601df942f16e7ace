"""Small models of Llama's shape in every form that a card keeps, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from support.quantised_models import (
    Quantise,
    Writer,
    awq,
    compressed,
    fp8,
    gptq,
    library_model,
    mlx,
    nvfp4,
    write,
    write_gguf,
)

Write = Callable[[Path], Path]


def quantised(how: Quantise) -> Write:
    return lambda root: write(root, "llama", how).quantised


def gguf(kind: str) -> Write:
    return lambda root: write_gguf(root, Writer(library_model("llama")), kind).quantised


FILES: dict[str, Write] = {
    "mlx 4": quantised(mlx(4, 64)),
    "mlx 8": quantised(mlx(8, 64)),
    "compressed 4": quantised(compressed(4, 32)),
    "compressed 8": quantised(compressed(8, None)),
    "gptq": quantised(gptq(4, 64)),
    "awq": quantised(awq(64)),
    "fp8 rows": quantised(fp8(None)),
    "fp8 squares": quantised(fp8((64, 64))),
    "Q8_0": gguf("Q8_0"),
    "Q4_0": gguf("Q4_0"),
    "mlx 3": quantised(mlx(3, 64)),
    "Q5_0": gguf("Q5_0"),
    "Q5_1": gguf("Q5_1"),
    "Q4_1": gguf("Q4_1"),
    "MXFP4": gguf("MXFP4"),
    "nvfp4": quantised(nvfp4("modelopt")),
}
