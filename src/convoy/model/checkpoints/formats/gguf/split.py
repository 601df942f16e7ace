"""Read a model of one GGUF file, or of several that llama.cpp split: ``NAME-00001-of-00005.gguf``.

Each file has a header with its own tensors. The first has the settings and the tokeniser.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from convoy.errors import ModelError
from convoy.model.checkpoints.formats.gguf.header import GgufHeader, read_gguf

SUFFIX = ".gguf"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.ASCII)
_MAX_SHARDS = 4096
# projectors of images, which lie beside some models
_BESIDE = "mmproj"


def shard_paths(path: Path) -> list[Path]:
    """Return the paths of all files of the model that ``path`` is a file of, whether or not they exist."""
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    count, number = int(match["count"]), int(match["number"])
    if not 1 <= number <= count <= _MAX_SHARDS:
        raise ModelError(
            f"{path} is named as file {number} of {count}, expected 1 to the last of at most {_MAX_SHARDS}"
        )
    return [path.with_name(f"{match['stem']}-{one:05}-of-{count:05}.gguf") for one in range(1, count + 1)]


def shards_of(path: Path) -> list[Path]:
    """Return all files of the model that ``path`` is a file of. Raises ModelError naming a missing one."""
    shards = shard_paths(path)
    lacking = next((shard for shard in shards if not shard.is_file()), None)
    if lacking is not None and len(shards) > 1:
        raise ModelError(
            f"{path.parent} lacks the shard {lacking.name}, and {path.name} is one of {len(shards)}",
            hint="fetch that file too; all shards of a model are needed",
        )
    return shards


def model_name(path: Path) -> str:
    """Return a file's name without suffix and number."""
    match = _SHARD.fullmatch(path.name)
    return path.stem if match is None else match["stem"]


def is_beside(path: Path) -> bool:
    """Return whether a file belongs to a model and holds none of its own, such as a projector of images."""
    return path.name.startswith(_BESIDE)


def find_gguf(directory: Path) -> Path | None:
    """Return the first file of the only GGUF model in a directory, or None without one.

    Raises ModelError if there are several.
    """
    found: dict[str, Path] = {}
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        if not is_beside(path):
            found.setdefault(model_name(path), path)
    if len(found) > 1:
        names = ", ".join(sorted(path.name for path in found.values())[:4])
        raise ModelError(
            f"{directory} holds {len(found)} GGUF models: {names}",
            hint=f"name one of the files: {next(iter(found.values()))}",
        )
    return next(iter(found.values()), None)


def read_shards(path: Path, *, whole: bool = True) -> GgufHeader:
    """Return the settings of a model and the tensors of all its files.

    Tensors need not be there if the files are not ``whole``. Raises ModelError for files that do not belong
    together, and as `header.read_gguf` does.
    """
    shards = shards_of(path)
    headers = [read_gguf(shard, whole=whole) for shard in shards]
    tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
    num_tensors = sum(len(header.tensors) for header in headers)
    for number, (shard, header) in enumerate(zip(shards, headers, strict=True)):
        expected = {"no": number, "count": len(shards), "tensors.count": num_tensors}
        for key, value in expected.items():
            said = header.settings.get(f"split.{key}", value if len(shards) == 1 else None)
            if said != value:
                raise ModelError(
                    f"{shard}: split.{key} is {said!r}, expected {value}",
                    hint="keep the names of the files as they were, and all files of one model together",
                )
    if len(tensors) != num_tensors:
        twice = next(name for name in tensors if sum(name in header.tensors for header in headers) > 1)
        raise ModelError(f"{path}: several shards have the tensor {twice}")
    return replace(headers[0], tensors=tensors)
