"""Make this process like one on a machine where nothing can be compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from convoy.model.kernels.int8 import native_holds
from convoy.model.kernels.native import build, library
from convoy.model.kernels.native.norm import norm_holds


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """Run the context without any C compiler. Linears that exist keep their compiled code."""
    try:
        with pytest.MonkeyPatch.context() as without:
            without.setattr("shutil.which", lambda _name: None)
            _forget()
            yield
    finally:
        _forget()


def _forget() -> None:
    for known in (build.built_library, library.native_library, native_holds, norm_holds):
        known.cache_clear()
