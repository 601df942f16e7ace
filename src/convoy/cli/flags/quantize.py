"""``--quantize`` and ``--compute``: round weights as they are loaded, and rows, as a kernel of the plan."""

from __future__ import annotations

from typing import Annotated

import typer

from convoy.cli.flags.table import option
from convoy.config.kernels import AUTO, INT8_KERNELS, QUANTIZED, computing_kernel
from convoy.errors import UsageError

QuantizeFlag = Annotated[
    str | None,
    typer.Option(help="q4 or q8: round weights to 4 or 8 bits at load, as `convoy quantize` does."),
]
ComputeFlag = Annotated[str | None, option("model", "compute")]


def kernel_for(
    quantize: str | None, kernel: str, compute: str | None = None, configured: str = "exact"
) -> str:
    """Return the kernel for ``--quantize`` and ``--compute``, or ``kernel`` without both.

    ``configured`` is the file's word for ``--compute``. Raises UsageError.
    """
    wanted = _quantized(quantize, kernel)
    if compute == "exact" and wanted in INT8_KERNELS:
        raise UsageError(
            f"--compute is exact, and the kernel is {wanted}", hint="leave out --compute, or the kernel"
        )
    return computing_kernel(wanted, compute or configured)


def _quantized(quantize: str | None, kernel: str) -> str:
    if quantize is None:
        return kernel
    if quantize not in QUANTIZED:
        raise UsageError(f"--quantize is {quantize}, expected {' or '.join(QUANTIZED)}")
    wanted = QUANTIZED[quantize]
    if kernel not in {AUTO, wanted}:
        raise UsageError(
            f"--quantize {quantize} runs the kernel {wanted}, and {kernel} is asked for",
            hint="leave out --quantize, or the kernel",
        )
    return wanted
