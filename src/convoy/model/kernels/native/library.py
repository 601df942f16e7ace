"""Call the compiled functions with torch's tensors and on torch's threads."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p
from typing import Any

import torch  # noqa: F401 - brings the OpenMP whose threads are used

from convoy.errors import SelfCheckError
from convoy.model.kernels.native.build import built_library

_THREADS = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


class F32Linear(ctypes.Structure):
    """Mirror `F32Linear` of `kernels.c`."""

    _fields_ = (
        *(("weight", c_void_p * 2), ("inputs", c_int64 * 2), ("run", c_int64 * 2)),
        *(("bias", c_void_p), ("outputs", c_int64)),
    )


class I8Linear(ctypes.Structure):
    """Mirror `I8Linear` of `kernels.c`."""

    _fields_ = (
        *(("weight", c_void_p), ("scale", c_void_p), ("start", c_void_p), ("bias", c_void_p)),
        *(("inputs", c_int64), ("outputs", c_int64)),
    )


class StoredRangeStruct(ctypes.Structure):
    """Mirror `StoredRange` of `stored.c`."""

    _fields_ = (
        *((name, c_void_p) for name in ("packed", "table", "bias")),
        *(
            (name, c_int64)
            for name in ("kind", "outputs", "first", "group", "scale", "second", "panel_bytes")
        ),
    )


class StoredLinearStruct(ctypes.Structure):
    """Mirror `StoredLinear` of `stored.c`."""

    _fields_ = (
        *(("ranges", POINTER(StoredRangeStruct)), ("num_ranges", c_int64)),
        *(("inputs", c_int64 * 2), ("run", c_int64 * 2)),
    )


class StoredSourceStruct(ctypes.Structure):
    """Mirror `StoredSource` of `stored.c`."""

    _fields_ = (
        *((name, c_void_p) for name in ("codes", "scales", "seconds", "fifths")),
        *((f"{of}_{by}", c_int64) for of in ("codes", "scales", "seconds") for by in ("row", "step")),
        *(("span", c_int64), ("flip", c_int64)),
    )


class HeadsStruct(ctypes.Structure):
    """Mirror `Heads` of `kernels.c`."""

    _fields_ = tuple(
        (name, c_int64) for name in ("num_heads", "kv_heads", "dim", "rotary_dim", "block_size", "kv_dtype")
    )


class ChunkStruct(ctypes.Structure):
    """Mirror `Chunk` of `kernels.c`."""

    _fields_ = (
        *((name, c_void_p) for name in ("query_rows", "kv_runs", "bag_pairs", "bag_starts", "hidden")),
        *((name, c_int64) for name in ("num_tiles", "num_pairs", "num_masked", "longest")),
    )


class LinearStruct(ctypes.Structure):
    """Mirror `Linear` of `kernels.c`: exactly one of the three pointers is set."""

    _fields_ = (
        *(("f32", POINTER(F32Linear)), ("i8", POINTER(I8Linear)), ("stored", POINTER(StoredLinearStruct))),
        ("outputs", c_int64),
    )


class LayerStruct(ctypes.Structure):
    """Mirror `Layer` of `kernels.c`."""

    _fields_ = (
        ("norms", c_void_p * 4),
        *((name, LinearStruct) for name in ("qkv", "out", "gate", "up", "down")),
        *(("eps", c_float * 4), ("hidden", c_int64), ("between", c_int64)),
    )


class WorkStruct(ctypes.Structure):
    """Mirror `Work` of `kernels.c`."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "normed", "heads", "turned", "mixed", "both", "raised")),
        *((name, c_void_p) for name in ("shares", "cos", "sin", "write_rows")),
        *(("of", POINTER(HeadsStruct)), ("chunks", POINTER(ChunkStruct))),
        *((name, c_int64) for name in ("num_chunks", "rows", "tokens", "threads")),
    )


_LINEAR = [c_void_p, c_int64, c_void_p, c_int64, c_int64]  # x, stride, y, rows, threads
_ARGUMENTS: dict[str, list[Any]] = {
    "convoy_init": [c_void_p] * 3,
    "convoy_f32_linear": [POINTER(F32Linear), *_LINEAR],
    "convoy_i8_linear": [POINTER(I8Linear), *_LINEAR],
    "convoy_i8_size": [c_int64, c_int64],
    "convoy_i8_pack": [c_void_p, c_int64, c_int64, c_void_p, c_void_p],
    "convoy_stored_linear": [POINTER(StoredLinearStruct), *[c_void_p, c_int64] * 2, c_int64, c_int64],
    "convoy_stored_panel_bytes": [POINTER(StoredRangeStruct), c_int64],
    "convoy_stored_pack": [
        *map(POINTER, (StoredRangeStruct, StoredSourceStruct)),
        c_int64,
        c_void_p,
        c_int64,
    ],
    "convoy_stored_unpack": [POINTER(StoredRangeStruct), c_int64, c_void_p, c_int64, c_int64, c_void_p],
    "convoy_norm": [c_void_p, c_void_p, c_float, c_void_p, c_int64, c_int64, c_int64],
    "convoy_turn": [POINTER(HeadsStruct), *[c_void_p] * 6, c_int64],
    "convoy_scores": [POINTER(HeadsStruct), POINTER(ChunkStruct), *[c_void_p] * 3, c_int64],
    "convoy_mix": [POINTER(HeadsStruct), POINTER(ChunkStruct), *[c_void_p] * 3, c_int64],
    "convoy_layer_scores": [POINTER(LayerStruct), POINTER(LayerStruct), POINTER(WorkStruct), c_void_p],
    "convoy_layer_mix": [POINTER(LayerStruct), POINTER(WorkStruct), c_void_p],
}
_RESULTS: dict[str, Any] = dict.fromkeys(
    ("convoy_i8_size", "convoy_stored_panel_bytes"), c_int64
) | dict.fromkeys(("convoy_i8_linear", "convoy_layer_scores", "convoy_layer_mix"), c_int)


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """Return the compiled functions, or None. `why_no_native` returns the reason."""
    try:
        return _load()
    except SelfCheckError:
        return None


def why_no_native() -> str:
    """Return why nothing is compiled here, or ""."""
    try:
        _load()
    except SelfCheckError as error:
        return error.message
    return ""


def _load() -> ctypes.CDLL:
    """Compile and load the library, and share torch's threads with it. Raises SelfCheckError."""
    try:
        # The functions of the OpenMP that torch has loaded: a second OpenMP would start threads of its own.
        own = ctypes.CDLL(None)
        threads = [ctypes.cast(getattr(own, name), c_void_p) for name in _THREADS]
    except (AttributeError, OSError) as error:
        raise SelfCheckError(
            "this build of torch does not run on GNU OpenMP, so its threads cannot be shared"
        ) from error
    try:
        library = ctypes.CDLL(str(built_library()))
    except OSError as error:
        raise SelfCheckError(f"the compiled kernels cannot be loaded: {error}") from error
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, _RESULTS.get(name)
    library.convoy_init(*threads)
    return library
