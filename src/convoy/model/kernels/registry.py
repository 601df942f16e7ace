"""Tell in which form this machine holds a kernel's weights, and whether it has 8-bit products.

The rows stand in `config.kernels`, which knows no torch.
"""

from __future__ import annotations

import functools

from convoy.config.kernels import held_form
from convoy.errors import SelfCheckError
from convoy.model.kernels.native.library import keeps_stored, native_libraries, native_library
from convoy.model.kernels.stored.int8 import SAMPLES, failing_int8


@functools.cache
def why_no_int8() -> str:
    """Return why `--compute int8` is refused here, or "".

    Compiled code is compared with the definition on small matrices of each form, in about a second. Where
    nothing is compiled, the definition itself is used.
    """
    failing = set() if native_library() is None else set(SAMPLES)
    for library in native_libraries():
        failing &= set(failing_int8(library))
        if not failing:
            return ""
    names = ", ".join(form for form in SAMPLES if form in failing)
    return f"the compiled 8-bit products have other bits here: {names}" if failing else ""


def slow_int8() -> str:
    """Return which 8-bit products another instruction set computes here, or ""."""
    library = native_library()
    failing = [] if library is None else failing_int8(library)
    if library is None or not failing or why_no_int8():
        return ""
    return f"the 8-bit products of {library.instruction_set.name} have other bits here: {', '.join(failing)}"


def require_int8() -> None:
    """Raise SelfCheckError where `--compute int8` is refused."""
    if reason := why_no_int8():
        raise SelfCheckError(reason, hint="leave out --compute int8")


def own_form(kernel: str) -> str:
    """Return the word of the form in which this machine holds a kernel's weights.

    Without compiled code, matrices in the form of their file would be unpacked in every step. So they are
    unpacked as they are read.
    """
    return held_form(kernel, unpacks=not keeps_stored())
