"""Define a model's manifest: a SHA-256 of each tensor and of each file beside the weights.

Two members with the same manifest have the same model, to the bit. The encoding is canonical, so the
manifest's digest is the SHA-256 of its bytes, and each part of a model is named by its own digest alone.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from convoy.errors import FrameError, ModelError
from convoy.model.checkpoints.checkpoint import StoredTensor, check_described
from convoy.wire.text import require_plain

MAX_MANIFEST_BYTES = 64 << 20
# of a tokeniser; the largest known has some tens of megabytes
MAX_FILE_BYTES = 256 << 20
MAX_TENSOR_BYTES = 1 << 40
# the only files read beside the weights; none of them holds code
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    # the part of a GGUF file before its tensors; members of a cluster get config.json instead
    "header.gguf",
)

_VERSION = 1
_LABEL = b"convoy tensor v1"
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]{1,6})\.", re.ASCII)
_MAX_DIMENSIONS = 8
_MAX_REASON = 300
_NOWHERE = Path()


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Describe one tensor of a manifest.

    ``digest`` is the hex SHA-256 over dtype, shape and bytes. For a synthetic tensor it covers the inputs
    from which the values are generated.
    """

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Describe a file beside the weights; ``digest`` is the hex SHA-256 of its bytes."""

    num_bytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """List the tensors and files of a whole model, independent of the members that own them."""

    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, FileEntry]

    @cached_property
    def encoded(self) -> bytes:
        """Return the canonical JSON encoding, which is the same on all members that have the same model."""
        described = {
            "version": _VERSION,
            "files": {name: [one.num_bytes, one.digest] for name, one in self.files.items()},
            "tensors": {
                name: [one.dtype, list(one.shape), one.num_bytes, one.digest]
                for name, one in self.tensors.items()
            },
        }
        return json.dumps(described, sort_keys=True, separators=(",", ":")).encode()

    @cached_property
    def digest(self) -> str:
        """Return the hex SHA-256 of the encoding."""
        return hashlib.sha256(self.encoded).hexdigest()

    @classmethod
    def decode(cls, data: bytes, digest: str) -> Manifest:
        """Decode a manifest that another member sent.

        Raises ModelError if the digest of ``data`` is not ``digest``, or if it does not describe a model.
        """
        found = hashlib.sha256(data).hexdigest()
        if found != digest:
            raise ModelError(f"a manifest came with the digest {found[:12]}, expected {digest[:12]}")
        try:
            described = json.loads(data)
            if described["version"] != _VERSION:
                raise ValueError(f"version {str(described['version'])[:16]!r}, expected {_VERSION}")
            manifest = cls(
                {name: _tensor_entry(name, entry) for name, entry in described["tensors"].items()},
                {name: _file_entry(name, entry) for name, entry in described["files"].items()},
            )
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
            FrameError,
            ModelError,
        ) as error:
            # limit the length: the error may quote the received bytes
            why = str(error)[:_MAX_REASON]
            raise ModelError(f"the manifest {digest[:12]} describes no model: {why}") from error
        if manifest.digest != digest:
            raise ModelError(f"the manifest {digest[:12]} is not in its canonical form")
        return manifest

    def first_difference(self, own: Mapping[str, str]) -> str | None:
        """Describe the first tensor with a digest in ``own`` that differs from this manifest's; None if none
        does.

        ``own`` maps tensor names to digests. The lowest layer is compared first.
        """
        for name in sorted(own, key=layer_order):
            listed = self.tensors.get(name)
            if listed is None:
                return f"{_place(name)}: {name} is not in the manifest"
            found, expected = own[name], listed.digest
            if found != expected:
                return f"{_place(name)}: {name} has the digest {found[:12]}, expected {expected[:12]}"
        return None


def start_tensor_digest(dtype: str, shape: Iterable[int]) -> bytes:
    """Return the bytes hashed before a tensor's own: label, dtype and shape, each after its length."""
    sizes = b"".join(struct.pack(">Q", size) for size in shape)
    parts = (_LABEL, dtype.encode(), sizes)
    return b"".join(struct.pack(">I", len(part)) + part for part in parts)


def layer_of(name: str) -> int | None:
    """Return the layer that a tensor belongs to; None for embedding, last norm and output."""
    match = _LAYER.search(name)
    return None if match is None else int(match[1])


def layer_order(name: str) -> tuple[int, str]:
    """Return a sort key: the embedding comes first, then the layers, then the tensors after them."""
    layer = layer_of(name)
    if layer is not None:
        return layer, name
    return (-1 if "embed" in name else 1 << 30), name


def _place(name: str) -> str:
    layer = layer_of(name)
    if layer is not None:
        return f"at layer {layer}"
    return "in the embedding" if "embed" in name else "behind the last layer"


def _tensor_entry(name: str, entry: Any) -> TensorEntry:
    require_plain(name, "a tensor of a manifest")
    dtype, shape, num_bytes, digest = entry
    if not isinstance(dtype, str) or not 1 <= len(dtype) <= 16 or not dtype.isascii():
        raise ValueError(f"{name} has no dtype")
    sizes = (*shape, num_bytes)
    if len(shape) > _MAX_DIMENSIONS or not all(_is_size(size, MAX_TENSOR_BYTES) for size in sizes):
        raise ValueError(f"{name} has no shape that fits {MAX_TENSOR_BYTES} bytes")
    check_described("a manifest", StoredTensor(name, _NOWHERE, dtype, tuple(shape), 0, num_bytes))
    return TensorEntry(dtype, tuple(shape), num_bytes, _checked_digest(name, digest))


def _file_entry(name: str, entry: Any) -> FileEntry:
    if name not in FILES:
        raise ValueError("a file with a name that no manifest may hold")
    num_bytes, digest = entry
    if not _is_size(num_bytes, MAX_FILE_BYTES):
        raise ValueError(f"{name} has no size up to {MAX_FILE_BYTES} bytes")
    return FileEntry(num_bytes, _checked_digest(name, digest))


def _checked_digest(name: str, digest: Any) -> str:
    if not isinstance(digest, str) or _DIGEST.fullmatch(digest) is None:
        raise ValueError(f"{name} has no SHA-256")
    return digest


def _is_size(value: object, most: int) -> bool:
    return type(value) is int and 0 <= value <= most
