"""Where a model comes from: a bundled one by name, or a Hugging Face directory on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from convoy.errors import ModelError
from convoy.model.checkpoint import StoredTensor, file_bytes, read_headers
from convoy.plan.spec import ModelSpec

BUNDLED = ("demo", "demo-mini")
_BUNDLED_DIRECTORY = Path(__file__).resolve().parent.parent / "models"
_MAX_CONFIG_BYTES = 16 << 20


@dataclass(frozen=True)
class ModelSource:
    """A model on this machine, described but not loaded.

    ``digest`` is the hex SHA-256 over the configuration and the names, dtypes and shapes of all tensors:
    members that differ in it have different models. It does not cover the weights' values.
    """

    name: str
    path: Path
    config: Mapping[str, object]
    spec: ModelSpec
    digest: str
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def resolve(cls, name_or_path: str) -> ModelSource:
        """Find a bundled model by name, or a directory by path.

        Raises ModelError for a directory that is not there, has no config.json or no weights, or holds a type
        of model that is not supported.
        """
        directory = Path(name_or_path).expanduser()
        name = directory.resolve().name
        if name_or_path in BUNDLED:
            directory, name = _BUNDLED_DIRECTORY / name_or_path, name_or_path
        if not directory.is_dir():
            raise ModelError(
                f"no model at {name_or_path}",
                hint=f"give a Hugging Face directory, or a bundled model: {', '.join(BUNDLED)}",
            )
        config = _read_config(directory / "config.json")
        spec = ModelSpec.from_config(config, name)
        tensors = read_headers(directory)
        return cls(name, directory.resolve(), config, spec, _digest(config, tensors), tensors)


def _read_config(path: Path) -> dict[str, object]:
    try:
        config = json.loads(file_bytes(path, _MAX_CONFIG_BYTES))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds a {type(config).__name__}, expected an object")
    return config


def _digest(config: Mapping[str, object], tensors: Mapping[str, StoredTensor]) -> str:
    described = [[t.name, t.dtype, list(t.shape)] for t in sorted(tensors.values(), key=lambda t: t.name)]
    text = json.dumps([dict(config), described], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
