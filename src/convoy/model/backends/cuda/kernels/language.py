"""Wrap Triton's compiler in a decorator that type checks where Triton is not installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton


def kernel(function: Callable[..., Any]) -> Any:
    """Compile with `triton.jit`, for launches as ``kernel[grid](...)`` or calls from another kernel.

    The body is Triton's language. It is compiled at the first launch, once for each set of constants.
    """
    return triton.jit(function)


def kernel_of_any(*numbers: str) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator like `kernel` that compiles once for all values of the named arguments.

    Triton would otherwise compile anew for 1 and for multiples of 16.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        return triton.jit(function, do_not_specialize=list(numbers))

    return decorate


def next_power(number: int, least: int = 1) -> int:
    """Return the least power of two that is not below ``number`` and ``least``.

    A kernel's ranges need such sizes.
    """
    power = 1
    while power < max(number, least):
        power *= 2
    return power
