"""Call the compiled functions with torch's tensors and on torch's threads."""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
from collections.abc import Iterator
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

from convoy.errors import SelfCheckError
from convoy.model.kernels.native.build import (
    AVX512,
    InstructionSet,
    built_library,
    missing_features,
    own_sets,
)

_log = logging.getLogger(__name__)
_THREADS = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


class F32Linear(ctypes.Structure):
    """Mirror `F32Linear` of `kernels.c`."""

    _fields_ = (
        *(("weight", c_void_p * 2), ("inputs", c_int64 * 2), ("run", c_int64 * 2)),
        *(("bias", c_void_p), ("outputs", c_int64)),
    )


class StoredCodesStruct(ctypes.Structure):
    """Mirror `StoredCodes` of `ranges.h`."""

    _fields_ = (
        *((name, c_void_p) for name in ("values", "scale_values", "places")),
        *((name, c_int64) for name in ("bits", "inputs", "centre", "how", "blocks", "rounded")),
        *(("groups", c_int64), ("outers", c_int64), ("offset", c_float * 2)),
    )


class StoredRangeStruct(ctypes.Structure):
    """Mirror `StoredRange` of `ranges.h`."""

    _fields_ = (
        *((name, c_void_p) for name in ("packed", "table", "bias")),
        *(
            (name, c_int64)
            for name in ("kind", "outputs", "first", "group", "scale", "second", "panel_bytes")
        ),
        ("codes", c_void_p),
    )


class StoredLinearStruct(ctypes.Structure):
    """Mirror `StoredLinear` of `stored.c`."""

    _fields_ = (
        *(("ranges", POINTER(StoredRangeStruct)), ("num_ranges", c_int64)),
        *(("inputs", c_int64 * 2), ("run", c_int64 * 2)),
    )


class StoredSourceStruct(ctypes.Structure):
    """Mirror `StoredSource` of `ranges.h`."""

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


class LoneRowsStruct(ctypes.Structure):
    """Mirror `LoneRows` of `batch.c`."""

    _fields_ = (
        *((name, c_void_p) for name in ("positions", "tables", "starts", "sizes")),
        *(
            (name, c_int64)
            for name in ("num_rows", "num_blocks", "kv_heads", "block_size", "window", "joined")
        ),
    )


class LoneTilesStruct(ctypes.Structure):
    """Mirror `LoneTiles` of `batch.c`."""

    _fields_ = (
        *(
            (name, c_void_p)
            for name in ("write_rows", "query_rows", "kv_runs", "pair_tile", "bag_pairs", "bag_starts")
        ),
        *(("hidden", c_void_p), ("num_pairs", c_int64)),
    )


class ShapeStruct(ctypes.Structure):
    """Mirror `Shape` of `attention.h`."""

    _fields_ = tuple(
        (name, c_int64)
        for name in (
            *("num_heads", "kv_heads", "dim", "value_dim", "value_stride"),
            *("block_size", "kv_dtype", "joined"),
        )
    )


class TilesStruct(ctypes.Structure):
    """Mirror `Tiles` of `attention.h`."""

    _fields_ = (
        *((name, c_void_p) for name in ("query_rows", "kv_runs", "bag_pairs", "bag_starts", "hidden")),
        *((name, c_int64) for name in ("num_tiles", "num_pairs", "num_masked", "longest", "tile_tokens")),
    )


class AttentionStruct(ctypes.Structure):
    """Mirror `Attention` of `attention.h`."""

    _fields_ = (
        *(("shape", POINTER(ShapeStruct)), ("tiles", POINTER(TilesStruct)), ("num_tiles", c_int64)),
        *(("queries", c_void_p), ("stride", c_int64)),
        *((name, c_void_p) for name in ("keys", "values", "sinks", "memory", "out")),
        ("cap", c_float),
    )


class LinearStruct(ctypes.Structure):
    """Mirror `Linear` of `layers.c`: ``f32`` is set, or one or both of the others, or none for no linear."""

    _fields_ = (
        *(("f32", POINTER(F32Linear)), ("stored", POINTER(StoredLinearStruct))),
        *(("int8", POINTER(StoredLinearStruct)), ("outputs", c_int64)),
    )


class NormStruct(ctypes.Structure):
    """Mirror `Norm` of `layers.c`."""

    _fields_ = (
        ("weight", c_void_p),
        *((name, c_int64) for name in ("kind", "size", "step")),
        ("eps", c_float),
    )


class ActivationStruct(ctypes.Structure):
    """Mirror `Activation` of `activation.h`."""

    _fields_ = (("kind", c_int64), ("numbers", c_float * 4))


class LayerStruct(ctypes.Structure):
    """Mirror `Layer` of `layers.c`."""

    _fields_ = (
        *(("norms", NormStruct * 6), ("qkv", LinearStruct * 3)),
        *((name, LinearStruct) for name in ("out", "gate", "up", "down")),
        *(("sinks", c_void_p), ("activation", ActivationStruct)),
        *((name, c_int64) for name in ("hidden", "between", "rotation", "is_parallel")),
        *((name, c_float) for name in ("scale", "residual", "cap")),
    )


class WorkStruct(ctypes.Structure):
    """Mirror `Work` of `layers.c`."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "normed", "made", "heads", "turned", "mixed", "both", "raised")),
        *((name, c_void_p) for name in ("shares", "sunk", "cos", "sin", "write_rows")),
        *(("of", POINTER(HeadsStruct)), ("chunks", POINTER(ChunkStruct))),
        *((name, c_int64) for name in ("num_chunks", "rows", "tokens", "threads")),
    )


class LayerRunStruct(ctypes.Structure):
    """Mirror `LayerRun` of `layers.c`."""

    _fields_ = (("layer", POINTER(LayerStruct)), ("work", POINTER(WorkStruct)), ("pool", c_void_p))


class ExpertStruct(ctypes.Structure):
    """Mirror `Expert` of `layers.c`."""

    _fields_ = tuple((name, LinearStruct) for name in ("gate", "up", "down"))


class ExpertsStruct(ctypes.Structure):
    """Mirror `Experts` of `layers.c`."""

    _fields_ = (
        *(("each", POINTER(ExpertStruct)), ("activation", ActivationStruct)),
        *((name, c_int64) for name in ("num", "hidden", "between")),
    )


class ChoiceStruct(ctypes.Structure):
    """Mirror `Choice` of `layers.c`."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "weights", "numbers", "gathered", "both", "raised", "made")),
        *((name, c_void_p) for name in ("y", "order", "places")),
        *((name, c_int64) for name in ("rows", "chosen", "threads")),
    )


class RoundingStruct(ctypes.Structure):
    """Mirror `Rounding` of `rounding.c`."""

    _fields_ = (
        *((name, c_void_p) for name in ("rows", "weights", "scales", "squares", "errors", "nearest")),
        *((name, c_int64) for name in ("outputs", "inputs", "bits", "num_reaches")),
        ("reaches", c_float * 8),
    )


_LINEAR = [c_void_p, c_int64, c_void_p, c_int64, c_int64]  # x, stride, y, rows, threads
_ARGUMENTS: dict[str, list[Any]] = {
    "convoy_init": [c_void_p] * 3,
    "convoy_stored_linear": [POINTER(StoredLinearStruct), *[c_void_p, c_int64] * 2, c_int64, c_int64],
    "convoy_int8_linear": [POINTER(StoredLinearStruct), *[c_void_p, c_int64] * 2, c_int64, c_int64],
    "convoy_stored_panel_bytes": [POINTER(StoredRangeStruct), c_int64],
    "convoy_stored_pack": [
        *map(POINTER, (StoredRangeStruct, StoredSourceStruct)),
        c_int64,
        c_void_p,
        c_int64,
    ],
    "convoy_stored_unpack": [
        *(POINTER(StoredRangeStruct), c_int64, c_void_p),
        *(c_int64, c_int64, c_void_p),
    ],
    "convoy_f32_linear": [POINTER(F32Linear), *_LINEAR],
    "convoy_norm": [c_void_p, c_void_p, c_float, c_void_p, c_int64, c_int64, c_int64],
    "convoy_layer_begin": [POINTER(LayerStruct), POINTER(WorkStruct), c_void_p],
    "convoy_layer_end": [POINTER(LayerStruct), POINTER(WorkStruct)],
    "convoy_layers": [POINTER(LayerRunStruct), c_int64],
    "convoy_experts": [POINTER(ExpertsStruct), POINTER(ChoiceStruct)],
    "convoy_rotate": [
        *(POINTER(ShapeStruct), *[c_void_p] * 3, c_int64),
        *(*[c_void_p] * 3, c_int64, c_int64),
    ],
    "convoy_attend_floats": [POINTER(ShapeStruct), POINTER(TilesStruct), c_int64],
    "convoy_describe_lone": [POINTER(LoneRowsStruct), POINTER(LoneTilesStruct), c_int64],
    "convoy_spread": [POINTER(HeadsStruct), *[c_void_p] * 2, c_float, c_int64, *[c_void_p] * 2],
    "convoy_attend": [POINTER(AttentionStruct), c_int64],
    "convoy_round": [POINTER(RoundingStruct), c_void_p, c_int64],
    "convoy_apply": [c_void_p, c_int64, c_int64, c_int64],
    "convoy_activate": [
        *(POINTER(ActivationStruct), *[c_void_p, c_int64] * 2),
        *(c_void_p, c_int64, c_int64, c_int64),
    ],
}
_RESULTS: dict[str, Any] = dict.fromkeys(
    ("convoy_stored_panel_bytes", "convoy_attend_floats", "convoy_describe_lone"), c_int64
) | dict.fromkeys(
    (*("convoy_int8_linear", "convoy_layers", "convoy_layer_begin", "convoy_experts"),),
    c_int,
)


class NativeLibrary(ctypes.CDLL):
    """Hold the compiled functions for one instruction set."""

    instruction_set: InstructionSet
    # The wheel's file, and not one that was compiled here.
    is_prebuilt: bool

    @property
    def description(self) -> str:
        """Return the instruction set, and where the code was made."""
        return f"{self.instruction_set.name}, {'prebuilt' if self.is_prebuilt else 'compiled here'}"


def instruction_sets() -> tuple[InstructionSet, ...]:
    """Return the instruction sets to choose from, best first.

    A process that limits torch (`ATEN_CPU_CAPABILITY`) limits them too.
    """
    is_wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return tuple(one for one in own_sets() if is_wide or one is not AVX512)


@functools.cache
def native_library() -> NativeLibrary | None:
    """Return the compiled functions for the best instruction set, or None. `why_no_native` says why.

    A warning names better ones that cannot be used.
    """
    found = next(native_libraries(), None)
    for reason in [] if found is None else skipped_sets(found.instruction_set):
        _log.warning("%s", reason)
    return found


def skipped_sets(used: InstructionSet) -> list[str]:
    """Return a sentence for each better instruction set of this processor that has no library here."""
    reasons: list[str] = []
    for one in instruction_sets():
        if one == used:
            break
        found = find_library(one)
        if isinstance(found, SelfCheckError) and not missing_features(one):
            reasons.append(
                f"the code for {one.name} is not used: {found.message}; "
                f"that for {used.name} takes its place, and longer"
            )
    return reasons


def native_libraries() -> Iterator[NativeLibrary]:
    """Yield the compiled functions for each instruction set of this machine, best first.

    Each is compiled and loaded as it is asked for.
    """
    for one in instruction_sets():
        found = find_library(one)
        if isinstance(found, NativeLibrary):
            yield found


def keeps_stored() -> bool:
    """Return whether a stage here keeps matrices in the form of their file. If not, it unpacks them."""
    return native_library() is not None


def why_no_native() -> str:
    """Return why nothing is compiled here, or ""."""
    if native_library() is not None:
        return ""
    sets = own_sets()
    if not sets:
        return f"there is no compiled code for {platform.machine()}"
    found = find_library(sets[-1])
    return "" if isinstance(found, NativeLibrary) else found.message


@functools.cache
def find_library(of: InstructionSet) -> NativeLibrary | SelfCheckError:
    """Return the library for an instruction set, or why there is none. Nothing is compiled twice."""
    try:
        return load_library(of)
    except SelfCheckError as error:
        return error


def _torchs_threads() -> list[c_void_p]:
    """Return the functions of the GNU OpenMP that torch has loaded, or none where it runs on another one.

    A second OpenMP would start threads of its own.
    """
    own = ctypes.CDLL(None)
    try:
        return [ctypes.cast(getattr(own, name), c_void_p) for name in _THREADS]
    except AttributeError:
        return []


def load_library(of: InstructionSet, place: Path | None = None) -> NativeLibrary:
    """Load a library, and share torch's threads with it if it can. Raises SelfCheckError.

    ``place`` None loads the one of these sources, which is compiled if need be. A library of other sources
    may lack some functions.
    """
    is_own = place is None
    try:
        place = place or built_library(of)
        library = NativeLibrary(str(place))
    except OSError as error:
        raise SelfCheckError(f"the compiled kernels cannot be loaded: {error}") from error
    library.instruction_set, library.is_prebuilt = of, place == of.prebuilt
    for name, arguments in _ARGUMENTS.items():
        if not is_own and not hasattr(library, name):
            continue
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, _RESULTS.get(name)
    threads = _torchs_threads()
    if threads:
        library.convoy_init(*threads)
    return library
