"""Write safetensors shards tensor by tensor, in any order, with no more than one tensor in memory.

The `safetensors` package writes a file from all of its tensors at once. Here the headers come first, because
dtypes and shapes are known before any value. Each tensor is then written at its place.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from convoy.model.checkpoints.checkpoint import DTYPES, INDEX, SINGLE, StoredTensor

if TYPE_CHECKING:
    import torch

MAX_SHARD_BYTES = 4 << 30
# bytes written at a time, so that an interrupt is seen soon
_WRITE_BYTES = 16 << 20


@dataclass(frozen=True)
class PlannedTensor:
    """Describe a tensor to write; ``dtype`` is the name in the header, such as "BF16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the values."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]


class ShardWriter:
    """Write the shards of a checkpoint into ``folder``, and their index if there are several.

    A shard ends before ``max_bytes``, unless it has a single larger tensor. Close the writer in any case.
    Every method may raise OSError.
    """

    def __init__(
        self, folder: Path, planned: Iterable[PlannedTensor], max_bytes: int = MAX_SHARD_BYTES
    ) -> None:
        self._files: dict[Path, IO[bytes]] = {}
        self._places: dict[str, StoredTensor] = {}
        self._folder = folder
        shards = list(_shards(planned, max_bytes))
        for number, tensors in enumerate(shards, 1):
            name = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            self._begin(folder / name, tensors)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(tensor.num_bytes for tensor in self._places.values())

    def write(self, name: str, values: torch.Tensor) -> None:
        """Write one of the planned tensors, which has their dtype and shape."""
        import torch

        place = self._places[name]
        assert tuple(values.shape) == place.shape, f"{name} has another shape than planned"
        if not values.numel():
            return
        data = memoryview(values.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        assert len(data) == place.num_bytes, f"{name} has another size than planned"
        file = self._files[place.path]
        file.seek(place.offset)
        for start in range(0, len(data), _WRITE_BYTES):
            file.write(data[start : start + _WRITE_BYTES])

    def finish(self) -> None:
        """Put everything on disk, and write the index."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        if len(self._files) > 1:
            index = {
                "metadata": {"total_size": self.num_bytes},
                "weight_map": {name: tensor.path.name for name, tensor in self._places.items()},
            }
            (self._folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def _begin(self, path: Path, tensors: list[PlannedTensor]) -> None:
        """Create a shard, and write its header."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        starts, end = {}, 0
        # numbers of more bytes come first, so that each lies at a multiple of its size
        for tensor in sorted(tensors, key=lambda one: -DTYPES[one.dtype][1]):
            starts[tensor.name], end = end, end + tensor.num_bytes
            header[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [starts[tensor.name], end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file = self._files[path] = path.open("wb")
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        for one in tensors:
            offset = 8 + len(text) + starts[one.name]
            self._places[one.name] = StoredTensor(one.name, path, one.dtype, one.shape, offset, one.num_bytes)


def _shards(planned: Iterable[PlannedTensor], max_bytes: int) -> Iterator[list[PlannedTensor]]:
    """Yield the tensors of each shard, in order."""
    own: list[PlannedTensor] = []
    size = 0
    for tensor in planned:
        if own and size + tensor.num_bytes > max_bytes:
            yield own
            own, size = [], 0
        own.append(tensor)
        size += tensor.num_bytes
    yield own
