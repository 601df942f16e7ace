"""``--quantize`` and ``--compute``: round weights as they are loaded, and rows, as a kernel of the plan."""

from __future__ import annotations

from typing import Annotated

import typer

from convoy.cli.flags.table import option
from convoy.config.kernels import AUTO, CUDA_FP8, INT8_KERNELS, QUANTIZED, computing_kernel
from convoy.errors import UsageError

QuantizeFlag = Annotated[
    str | None,
    typer.Option(help="q4 or q8: round weights to 4 or 8 bits at load, as `convoy quantize` does."),
]
ComputeFlag = Annotated[str | None, option("model", "compute")]

# The keys of convoy.toml, as errors name them.
_KERNEL_KEY, _COMPUTE_KEY = "[model] kernel", "[model] compute"


def kernel_for(
    quantize: str | None,
    kernel: str,
    compute: str | None = None,
    configured: str = "exact",
    kernel_from: str = _KERNEL_KEY,
) -> str:
    """Return the kernel for ``--quantize`` and ``--compute``, or ``kernel`` without both.

    ``configured`` is the file's word for ``--compute``, and ``kernel_from`` the flag or key with ``kernel``.
    Raises UsageError, which names the flags and keys that were given.
    """
    wanted = _quantized(quantize, kernel, kernel_from)
    kernel_from = kernel_from if quantize is None else f"--quantize {quantize}"
    if compute == "exact" and wanted in (*INT8_KERNELS, CUDA_FP8):
        raise UsageError(
            f"--compute is exact, and {kernel_from} is {wanted}",
            hint=f"leave out --compute, or {kernel_from}",
        )
    compute_from = _COMPUTE_KEY if compute is None else "--compute"
    return computing_kernel(wanted, compute or configured, kernel_from=kernel_from, compute_from=compute_from)


def kernel_asked_by(kernel: str, quantize: str | None, compute: str | None, configured: str = "exact") -> str:
    """Return the flag or the key to leave out for another kernel than ``kernel``, a result of `kernel_for`.

    The other arguments are those of `kernel_for`.
    """
    is_rounding = kernel in (*INT8_KERNELS, CUDA_FP8)
    if is_rounding and compute is not None:
        return f"--compute {compute}"
    if is_rounding and configured != "exact":
        return _COMPUTE_KEY
    return _KERNEL_KEY if quantize is None else f"--quantize {quantize}"


def _quantized(quantize: str | None, kernel: str, kernel_from: str) -> str:
    if quantize is None:
        return kernel
    if quantize not in QUANTIZED:
        raise UsageError(
            f"--quantize is {quantize[:40]!r}, expected {' or '.join(QUANTIZED)}",
            hint="--quantize q8 rounds weights to 8 bits, --quantize q4 to 4; without it they stay as in the "
            "file",
        )
    wanted = QUANTIZED[quantize]
    if kernel not in {AUTO, wanted}:
        raise UsageError(
            f"--quantize {quantize} runs the kernel {wanted}, and {kernel_from} is {kernel}",
            hint=f"leave out --quantize, or {kernel_from}",
        )
    return wanted
