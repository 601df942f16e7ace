"""Triton's compiler behind a decorator that type checks where Triton is not installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton


def kernel(function: Callable[..., Any]) -> Any:
    """`triton.jit`: launched as ``kernel[grid](...)``, or called from another kernel.

    The body is Triton's language and is compiled at the first launch, once for each set of constants.
    """
    return triton.jit(function)


def kernel_of_any(*numbers: str) -> Callable[[Callable[..., Any]], Any]:
    """The same, compiled once for whatever these arguments are, and not anew for 1 and multiples of 16."""

    def decorate(function: Callable[..., Any]) -> Any:
        return triton.jit(function, do_not_specialize=list(numbers))

    return decorate


def next_power(number: int, least: int = 1) -> int:
    """The smallest power of two that is not below ``number`` and ``least``: what a kernel's ranges need."""
    power = 1
    while power < max(number, least):
        power *= 2
    return power
