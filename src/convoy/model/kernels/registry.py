"""Tell in which form this machine holds a kernel's weights, and whether it has 8-bit products.

The rows stand in `config.kernels`, which knows no torch.
"""

from __future__ import annotations

import functools

from convoy.config.kernels import held_form
from convoy.errors import SelfCheckError
from convoy.model.kernels.native.library import keeps_stored, native_libraries
from convoy.model.kernels.stored.int8 import failing_int8


@functools.cache
def why_no_int8() -> str:
    """Return why `--compute int8` is refused here, or "".

    Compiled code is compared with the definition on one small matrix of each form, in about a second. Where
    nothing is compiled, the definition itself is used.
    """
    library = next(native_libraries(), None)
    failing = [] if library is None else failing_int8(library)
    return f"the compiled 8-bit products have other bits here: {', '.join(failing)}" if failing else ""


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
