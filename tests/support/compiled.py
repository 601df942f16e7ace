"""Offer compiled code with a fault, and make this process like one where nothing can be compiled."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from convoy.model.kernels.native import build, library
from convoy.model.kernels.native.activation import exp_library
from convoy.model.kernels.native.linears import f32_library
from convoy.model.kernels.native.norm import norm_library
from convoy.model.kernels.stored.packed import onednn_holds
from convoy.model.quantize.search import rounding_library


class _Faulty:
    def __init__(self, right: library.NativeLibrary, name: str, output: int) -> None:
        self._right, self._name, self._output = right, name, output

    def __getattr__(self, name: str) -> Any:
        right = getattr(self._right, name)
        if name != self._name:
            return right

        def wrong(*given: Any) -> Any:
            done = right(*given)
            ctypes.c_uint32.from_address(given[self._output]).value ^= 1
            return done

        return wrong


def faulty(right: library.NativeLibrary, name: str, output: int) -> library.NativeLibrary:
    """Return a library whose function ``name`` flips the lowest bit of the first number of its output.

    ``output`` is the place of the output among the function's arguments.
    """
    return cast("library.NativeLibrary", _Faulty(right, name, output))


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
    found = (build.built_library, library.find_library, library.native_library)
    others = (exp_library, norm_library, f32_library, onednn_holds, rounding_library)
    for known in (*found, *others):
        known.cache_clear()
