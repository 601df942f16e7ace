"""Open a GGUF model from the headers of its files: the library's config.json, and the stored tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from convoy.model.checkpoints.checkpoint import StoredTensor
from convoy.model.checkpoints.formats.gguf.names import find_family, renamed
from convoy.model.checkpoints.formats.gguf.settings import read_settings
from convoy.model.checkpoints.formats.gguf.split import model_name, read_shards, shards_of


@dataclass(frozen=True)
class GgufModel:
    """Hold a model in the library's settings, with its stored tensors under the library's names."""

    name: str
    # of the file with the settings, and the bytes before its first tensor
    path: Path
    header_bytes: int
    config: dict[str, object]
    tensors: dict[str, StoredTensor]


def config_bytes(config: Mapping[str, object]) -> bytes:
    """Return the config.json that a GGUF file stands for; equal settings give equal bytes."""
    return json.dumps(dict(config), sort_keys=True, separators=(",", ":")).encode()


def open_gguf(path: Path, *, whole: bool = True) -> GgufModel:
    """Read the description of the model that ``path`` is a file of.

    The tensors, apart from factors of frequencies, need not be there if the files are not ``whole``. Raises
    ModelError for an architecture or a tensor that is not supported, and for a missing file.
    """
    header, first = read_shards(path, whole=whole), shards_of(path)[0]
    architecture = header.settings.get("general.architecture")
    experts = header.settings.get(f"{architecture}.expert_count")
    found = find_family(path, architecture, has_experts=bool(experts))
    config = read_settings(path, header, found)
    tensors = {one.name: one for one in renamed(header.tensors.values(), found.form, config)}
    return GgufModel(model_name(path), first, header.num_bytes, config, tensors)
