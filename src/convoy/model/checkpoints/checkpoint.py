"""Read the headers of a safetensors checkpoint, and map a tensor's data only on demand.

Only safetensors files are opened, never a pickled one. The headers are parsed here, because the digest, the
shapes and the byte counts must be known before any weight is touched. Torch is not imported until a tensor is
mapped, so a plan or an error about flags does not wait for it.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from convoy.errors import ModelError

if TYPE_CHECKING:
    import torch

FETCH_AGAIN = "fetch the file again: it is incomplete, or another program changed it"
_READABLE = "check the path, and that you may read the file"

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEADER_BYTES = 100 << 20
MAX_INDEX_BYTES = 256 << 20
# torch's name of the dtype, and the bytes of one number
DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "U32": ("uint32", 4),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}


@dataclass(frozen=True)
class StoredTensor:
    """Describe one tensor of a checkpoint, as its file's header does."""

    name: str
    path: Path
    # the name in the header, such as "F32" or "BF16"
    dtype: str
    shape: tuple[int, ...]
    # of the first byte, in the file
    offset: int
    num_bytes: int


def read_headers(directory: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the checkpoint in ``directory``, by name.

    Raises ModelError if the directory has no safetensors weights, a shard is missing, or a file is truncated
    or malformed.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in _weight_files(directory):
        for tensor in _read_header(path):
            tensors[tensor.name] = tensor
    return tensors


def map_tensor(stored: StoredTensor) -> torch.Tensor:
    """Map a tensor from its file. Pages are read as they are touched, and no other tensor's pages are.

    One mapping per tensor, not one per file: a private mapping of a whole shard is charged against memory, so
    a small machine could not open a large shard. Raises ModelError naming file and tensor.
    """
    import torch

    known = DTYPES.get(stored.dtype)
    if known is None:
        raise ModelError(f"{stored.path}: {stored.name} has the dtype {stored.dtype}, which is not supported")
    dtype = getattr(torch, known[0])
    if not stored.num_bytes:
        return torch.empty(stored.shape, dtype=dtype)
    try:
        # a mapping begins at a whole page
        skipped = stored.offset % mmap.ALLOCATIONGRANULARITY
        with stored.path.open("rb") as file:
            # map copy on write: torch needs writable memory, and the file must not change
            mapped = mmap.mmap(
                file.fileno(),
                skipped + stored.num_bytes,
                access=mmap.ACCESS_COPY,
                offset=stored.offset - skipped,
            )
    except (OSError, ValueError) as error:
        raise ModelError(f"{stored.path} cannot be read: {error}", hint=_READABLE) from error
    data = torch.frombuffer(mapped, dtype=torch.uint8, count=stored.num_bytes, offset=skipped)
    return data.view(dtype).view(stored.shape)


def has_safetensors(directory: Path) -> bool:
    """Tell whether a directory has weights as safetensors, or an index of them."""
    return (directory / INDEX).is_file() or (directory / SINGLE).is_file()


def _weight_files(directory: Path) -> list[Path]:
    index = directory / INDEX
    if index.is_file():
        shards = parse_index(str(index), file_bytes(index, MAX_INDEX_BYTES))
        lacking = {name: tensor for tensor, name in shards.items() if not (directory / name).is_file()}
        for name, tensor in sorted(lacking.items()):
            raise ModelError(
                f"{directory} lacks the shard {name}, which its index names for {tensor}",
                hint="fetch that file again; an interrupted download resumes",
            )
        return [directory / name for name in sorted(set(shards.values()))]
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    others = sorted(p.name for p in directory.glob("*") if p.suffix in {".bin", ".pt", ".pth"})
    hint = f"{others[0]} is not read: convert the weights to safetensors" if others else None
    raise ModelError(f"{directory} has no weights, expected model.safetensors", hint=hint)


def index_files(index: Path) -> list[str]:
    """Return the names of the shards that an index lists. Raises ModelError if a shard does not lie beside
    it.
    """
    return sorted(set(parse_index(str(index), file_bytes(index, MAX_INDEX_BYTES)).values()))


def parse_index(place: str, data: bytes) -> dict[str, str]:
    """Return the shard of each tensor, by tensor name. Raises ModelError naming ``place`` for a malformed
    index.
    """
    try:
        shards = dict(json.loads(data)["weight_map"])
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelError(f"{place} is not an index of safetensors shards", hint=FETCH_AGAIN) from error
    for name in shards.values():
        # accept shards beside the index only: an index must not make us open files elsewhere
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(
                f"{place} names the shard {name!r}, expected a .safetensors file beside it", hint=FETCH_AGAIN
            )
    return shards


def _read_header(path: Path) -> Iterator[StoredTensor]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = header_bytes(str(path), file.read(8), size)
            raw = file.read(length)
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read: {(error.strerror or 'unreadable').lower()}", hint=_READABLE
        ) from error
    entries = parse_header(path, raw)
    last = max(entries, key=lambda tensor: tensor.offset + tensor.num_bytes, default=None)
    if last is not None and size < last.offset + last.num_bytes:
        raise ModelError(
            f"{path} is truncated: it has {size} bytes, and its header describes "
            f"{last.offset + last.num_bytes}, the last of them of {last.name}",
            hint=FETCH_AGAIN,
        )
    yield from entries


def header_bytes(place: str, prefix: bytes, size: int | None = None) -> int:
    """Return a safetensors header's length in bytes, from the file's first 8 bytes. Raises ModelError."""
    length = int.from_bytes(prefix, "little")
    most = _MAX_HEADER_BYTES if size is None else min(_MAX_HEADER_BYTES, size - 8)
    if len(prefix) < 8 or length > most:
        have = "" if size is None else f"{size} bytes, "
        raise ModelError(
            f"{place} is truncated or not safetensors: {have}header of {length}", hint=FETCH_AGAIN
        )
    return length


def parse_header(path: Path, raw: bytes) -> list[StoredTensor]:
    """Return the tensors that a header describes, at their places in the file ``path``. Raises ModelError."""
    try:
        header: dict[str, dict[str, object]] = json.loads(raw)
        header.pop("__metadata__", None)
        return [_stored(path, name, entry, 8 + len(raw)) for name, entry in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} has a malformed safetensors header", hint=FETCH_AGAIN) from error


def _stored(path: Path, name: str, entry: dict[str, object], base: int) -> StoredTensor:
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not isinstance(shape, list) or not isinstance(offsets, list):
        raise TypeError(name)
    if not all(type(number) is int and number >= 0 for number in [*shape, *offsets]):
        raise TypeError(name)
    start, end = offsets
    return check_described(
        str(path), StoredTensor(name, path, dtype, tuple(shape), base + start, end - start)
    )


def check_described(place: str, tensor: StoredTensor) -> StoredTensor:
    """Return ``tensor`` if its size fits its dtype and shape. Raises ModelError naming ``place``."""
    dtype, shape, num_bytes = tensor.dtype, tensor.shape, tensor.num_bytes
    known = DTYPES.get(dtype)
    if num_bytes < 0 or (known is not None and math.prod(shape) * known[1] != num_bytes):
        raise ModelError(
            f"{place}: {tensor.name} has {num_bytes} bytes, expected {dtype} of shape {list(shape)}",
            hint=FETCH_AGAIN,
        )
    return tensor


def file_bytes(path: Path, limit: int) -> bytes:
    """Read a whole small file. Raises ModelError if it is missing, unreadable or over ``limit`` bytes."""
    try:
        if path.stat().st_size > limit:
            raise ModelError(f"{path} has {path.stat().st_size} bytes, expected at most {limit}")
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ModelError(
            f"{path.parent} has no {path.name}", hint="fetch the model's whole directory"
        ) from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {os.strerror(error.errno or 0)}", hint=_READABLE) from error
