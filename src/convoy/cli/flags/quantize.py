"""``--quantize``: round weights as they are loaded, as a kernel of the plan."""

from __future__ import annotations

from typing import Annotated

import typer

from convoy.config.table import row
from convoy.errors import UsageError
from convoy.plan.spec.kernels import QUANTIZED

QuantizeFlag = Annotated[
    str | None,
    typer.Option(help="int8: 8-bit weights, and activations on CPU; int4: 4-bit weights. Rounded at load."),
]
*_FIRST, _LAST = row("model", "kernel").choices
KERNELS = f"{', '.join(_FIRST)} or {_LAST}"


def kernel_for(quantize: str | None, kernel: str) -> str:
    """Return the kernel for ``--quantize``, or ``kernel`` without it. Raises UsageError."""
    if quantize is None:
        return kernel
    if quantize not in QUANTIZED:
        raise UsageError(f"--quantize is {quantize}, expected {' or '.join(QUANTIZED)}")
    # A member on CUDA takes its own kernel for this one.
    wanted, _ = QUANTIZED[quantize]
    if kernel not in {"auto", wanted}:
        raise UsageError(
            f"--quantize {quantize} runs the kernel {wanted}, and {kernel} is asked for",
            hint="leave out --quantize, or the kernel",
        )
    return wanted
