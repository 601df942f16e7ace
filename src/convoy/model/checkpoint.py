"""The tensors of a safetensors checkpoint: names, shapes and places from the headers; data only on demand.

Only safetensors files are opened, never a pickled one. The headers are parsed here, because the digest, the
shapes and the byte counts must be known before any weight is touched.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from convoy.errors import ModelError

_MAX_HEADER_BYTES = 100 << 20
_MAX_INDEX_BYTES = 256 << 20
_DTYPE_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4} | {
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint, as its file's header describes it."""

    name: str
    path: Path
    dtype: str  # the header's word: "F32", "BF16"
    shape: tuple[int, ...]
    num_bytes: int


def read_headers(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint in ``directory``, by name.

    Raises ModelError for a directory without safetensors weights, a missing shard, and a truncated or
    malformed file.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in _weight_files(directory):
        for tensor in _read_header(path):
            tensors[tensor.name] = tensor
    return tensors


def read_tensors(tensors: Iterable[StoredTensor]) -> Iterator[tuple[StoredTensor, torch.Tensor]]:
    """Map the given tensors, file by file; nothing else is read. Raises ModelError naming the file."""
    by_path: dict[Path, list[StoredTensor]] = {}
    for tensor in tensors:
        by_path.setdefault(tensor.path, []).append(tensor)
    for path, wanted in by_path.items():
        try:
            with safe_open(str(path), framework="pt") as file:
                for tensor in wanted:
                    yield tensor, file.get_tensor(tensor.name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = _index_files(index)
    elif (directory / "model.safetensors").is_file():
        names = ["model.safetensors"]
    else:
        others = sorted(p.name for p in directory.glob("*") if p.suffix in {".bin", ".pt", ".pth", ".gguf"})
        hint = f"{others[0]} is not read: convert the weights to safetensors" if others else None
        raise ModelError(f"{directory} has no weights, expected model.safetensors", hint=hint)
    for name in names:
        if not (directory / name).is_file():
            raise ModelError(f"{directory} lacks the shard {name}, which its index names")
    return [directory / name for name in names]


def _index_files(index: Path) -> list[str]:
    if index.stat().st_size > _MAX_INDEX_BYTES:
        raise ModelError(f"{index} has {index.stat().st_size} bytes, expected at most {_MAX_INDEX_BYTES}")
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index} is not an index of safetensors shards") from error
    for name in names:
        # a shard lies beside its index: an index must not make us open files elsewhere
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{index} names the shard {name!r}, expected a .safetensors file beside it")
    return sorted(names)


def _read_header(path: Path) -> Iterator[StoredTensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
            raise ModelError(f"{path} is truncated or not safetensors: {size} bytes, header of {length}")
        raw = file.read(length)
    try:
        header: dict[str, dict[str, object]] = json.loads(raw)
        header.pop("__metadata__", None)
        entries = [_stored(path, name, entry) for name, entry in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} has a malformed safetensors header") from error
    needed = 8 + length + sum(tensor.num_bytes for tensor in entries)
    if size < needed:
        raise ModelError(f"{path} is truncated: it has {size} bytes, its header describes {needed}")
    yield from entries


def _stored(path: Path, name: str, entry: dict[str, object]) -> StoredTensor:
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list) or not isinstance(dtype, str):
        raise TypeError(name)
    start, end = offsets
    num_bytes = end - start
    elements = 1
    for size in shape:
        elements *= size
    if start < 0 or num_bytes < 0 or (dtype in _DTYPE_BYTES and elements * _DTYPE_BYTES[dtype] != num_bytes):
        raise ModelError(f"{path}: {name} has {num_bytes} bytes, expected {dtype} of shape {shape}")
    return StoredTensor(name, path, dtype, tuple(shape), num_bytes)


def file_bytes(path: Path, limit: int) -> bytes:
    """A small file whole; ModelError if it is missing, unreadable or longer than ``limit``."""
    try:
        if path.stat().st_size > limit:
            raise ModelError(f"{path} has {path.stat().st_size} bytes, expected at most {limit}")
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent} has no {path.name}") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {os.strerror(error.errno or 0)}") from error
