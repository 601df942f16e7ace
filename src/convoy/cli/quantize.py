"""``--quantize``: weights rounded as they are loaded, as a kernel of the plan."""

from __future__ import annotations

from typing import Annotated

import typer

from convoy.errors import UsageError

QuantizeFlag = Annotated[
    str | None, typer.Option(help="int8: 8-bit weights and activations on CPU, rounded at load.")
]
KERNELS = "auto, exact-f32, plain-f32 or w8a8"


def kernel_for(quantize: str | None, kernel: str) -> str:
    """The kernel that ``--quantize`` asks for, or ``kernel`` without it. Raises UsageError."""
    if quantize is None:
        return kernel
    if quantize != "int8":
        raise UsageError(f"--quantize is {quantize}, expected int8")
    if kernel not in {"auto", "w8a8"}:
        raise UsageError(f"--quantize int8 runs the kernel w8a8, and {kernel} is asked for")
    return "w8a8"
