"""Record calls of compiled code with the memory that they read and write, to repeat them without Python.

A file is a sequence of steps, each a letter and numbers of 64 bits, little-endian: a region of memory (R),
bytes to write into one (F), an address to write into one (P), and a call (C) with its arguments, its result
and the bytes that it wrote. `tests/arm/replay.c` reads it. A region keeps its bytes from call to call.
"""

from __future__ import annotations

import ctypes
import gc
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch

from convoy.model.kernels.native.library import NativeLibrary

# The numbers of functions in `replay.c`.
FUNCTIONS = (
    *("stored_panel_bytes", "stored_pack", "stored_linear", "int8_linear", "stored_unpack", "f32_linear"),
    *("norm", "layer_begin", "layers", "layer_end", "experts", "rotate", "attend"),
    *("round", "apply", "activate"),
)


@dataclass
class _Region:
    """Hold the bytes that a region has in the repetition: None where they are not known."""

    number: int
    content: bytes | None


class Recorder:
    """Write the calls of one library to a file, between `recording` and its end."""

    def __init__(self, library: NativeLibrary, file: BinaryIO, patch: pytest.MonkeyPatch) -> None:
        """Take the place of the library's functions. What was built with them before is not recorded."""
        self._file, self._is_on = file, False
        self._before: list[Any] = []
        self._regions: dict[tuple[int, int], _Region] = {}
        self.counts = dict.fromkeys(FUNCTIONS, 0)
        for name in FUNCTIONS:
            function = getattr(library, f"convoy_{name}")
            patch.setattr(library, f"convoy_{name}", self._recorded(name, function))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls of the context."""
        # To look through all objects takes a second. Those of now stay as they are until the end.
        gc.unfreeze()
        self._before = _memory_of(gc.get_objects())
        gc.freeze()
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False
            self._before = []

    def _recorded(self, name: str, function: Any) -> Any:
        def call(*given: Any) -> Any:
            if not self._is_on:
                return function(*given)
            return self._record(name, function, given)

        return call

    def _record(self, name: str, function: Any, given: tuple[Any, ...]) -> Any:
        self.counts[name] += 1
        memory = _Memory((*self._before, *_memory_of((*gc.get_objects(), *_held(given)))))
        used: dict[tuple[int, int], bytes] = {}
        arguments = [
            self._argument(memory, used, kind, one)
            for kind, one in zip(function.argtypes, given, strict=True)
        ]
        scratch = memory.span(given[0]._obj.memory) if name == "attend" else None
        result = function(*given)
        self._write("C", FUNCTIONS.index(name), len(given))
        for kind, numbers in arguments:
            self._numbers(kind, *numbers)
        self._numbers(0 if result is None else result)
        changed: list[tuple[int, int, bytes]] = []
        for span, before in used.items():
            after, region = ctypes.string_at(*span), self._regions[span]
            if span == scratch:
                region.content = None
            elif after != before:
                region.content = after
                start, end = _differing(before, after)
                changed.append((region.number, start, after[start:end]))
        self._numbers(len(changed))
        for number, start, found in changed:
            self._numbers(len(found), number, start)
            self._file.write(found)
        return result

    def _argument(
        self, memory: _Memory, used: dict[tuple[int, int], bytes], kind: Any, given: Any
    ) -> tuple[int, tuple[Any, ...]]:
        """Return an argument's kind and numbers, after writing the memory that it leads to."""
        if kind is ctypes.c_float:
            return 2, (float(given),)
        if kind is ctypes.c_int64 or given is None:
            return 0, (given or 0,)
        address = given if isinstance(given, int) else ctypes.addressof(_target(given))
        return 1, self._place(memory, used, address)

    def _place(self, memory: _Memory, used: dict[tuple[int, int], bytes], address: int) -> tuple[int, int]:
        """Return the region and the place in it of an address, after writing it and all that it leads to."""
        start, size = span = memory.span(address)
        region = self._regions.get(span)
        if region is None:
            region = self._regions[span] = _Region(len(self._regions), None)
            self._write("R", size)
        if span not in used:
            content = used[span] = ctypes.string_at(start, size)
            if region.content != content:
                self._write("F", size, region.number, 0)
                self._file.write(content)
                region.content = content
            described = memory.objects.get(start)
            for offset in () if described is None else _pointers(type(described)):
                target = ctypes.c_void_p.from_address(start + offset).value
                if target:
                    found = self._place(memory, used, target)
                    self._write("P", region.number, offset, *found)
        return region.number, address - start

    def _write(self, step: str, *numbers: int) -> None:
        self._file.write(step.encode())
        self._numbers(*numbers)

    def _numbers(self, *numbers: float) -> None:
        for number in numbers:
            self._file.write(struct.pack("<d" if isinstance(number, float) else "<q", number))


class _Memory:
    """Find the tensors and structures that addresses lie in."""

    def __init__(self, known: Iterable[Any]) -> None:
        spans: dict[int, int] = {}
        self.objects: dict[int, Any] = {}
        for one in known:
            if isinstance(one, torch.Tensor):
                start, size = _tensor_span(one)
            else:
                start, size = ctypes.addressof(one), ctypes.sizeof(one)
                self.objects[start] = one
            if size > spans.get(start, 0):
                spans[start] = size
        self._spans = sorted(spans.items())
        self._starts = [start for start, _ in self._spans]

    def span(self, address: int) -> tuple[int, int]:
        """Return the address and the bytes of what an address lies in, or just behind."""
        at = bisect_right(self._starts, address) - 1
        start, size = self._spans[at]
        assert start <= address <= start + size, f"no tensor and no structure has the address {address:#x}"
        return start, size


def _memory_of(objects: Iterable[Any]) -> list[Any]:
    """Return the tensors among some objects, and the structures that are no part of others."""
    return [
        one
        for one in objects
        if issubclass(type(one), torch.Tensor)
        or (issubclass(type(one), (ctypes.Structure, ctypes.Array)) and one._b_base_ is None)
    ]


def _held(given: Iterable[Any]) -> list[Any]:
    """Return the structures that arguments refer to."""
    return [_target(one) for one in given]


def _target(given: Any) -> Any:
    """Return what ``given`` refers to, if it is a pointer or the result of `byref`, or itself."""
    return getattr(given, "contents", None) or getattr(given, "_obj", given)


def _tensor_span(one: torch.Tensor) -> tuple[int, int]:
    if one.is_mkldnn:
        return torch.ops.mkldnn.data_ptr(one), torch.ops.mkldnn._nbytes(one)
    if one.layout != torch.strided or one.device.type != "cpu":
        return 0, 0
    storage = one.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _pointers(kind: Any) -> Iterator[int]:
    """Yield the places of the addresses in a structure."""
    if issubclass(kind, ctypes.Structure):
        for name, of, *_ in kind._fields_:
            yield from (getattr(kind, name).offset + place for place in _pointers(of))
    elif issubclass(kind, ctypes.Array):
        size = ctypes.sizeof(kind._type_)
        yield from (i * size + place for i in range(kind._length_) for place in _pointers(kind._type_))
    elif issubclass(kind, (ctypes.c_void_p, ctypes._Pointer)):
        yield 0


def _differing(before: bytes, after: bytes) -> tuple[int, int]:
    """Return the first byte that differs, and the end of the last."""
    (places,) = np.nonzero(np.frombuffer(before, np.uint8) != np.frombuffer(after, np.uint8))
    return int(places[0]), int(places[-1]) + 1
