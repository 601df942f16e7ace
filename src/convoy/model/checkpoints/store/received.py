"""Store a model of which this machine has only some parts: a private folder of received, verified parts.

    CACHE/models/<digest of the manifest>/manifest.json
                                          config.json          in the place where `transformers` expects it
                                          tensors/<digest>     the bytes of one tensor
                                          tensors/<digest>.part   incomplete, or not yet verified

`store.parts` explains how a part gets its name. No peer or hub chooses a file name in here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from convoy.errors import ModelError
from convoy.model.checkpoints.checkpoint import StoredTensor
from convoy.model.checkpoints.manifest import Manifest, TensorEntry, start_tensor_digest
from convoy.model.checkpoints.source import ModelSource, read_config
from convoy.model.checkpoints.store.parts import (
    ModelPart,
    PartFile,
    alone_in,
    explained,
    is_whole,
    require_room,
    verify,
)
from convoy.model.checkpoints.tied import check_tied_digests

_log = logging.getLogger(__name__)

FOLDER = "models"
_MANIFEST = "manifest.json"
_TENSORS = "tensors"


class VerifiedParts:
    """Remember the parts that this process has verified, so that none is hashed twice."""

    def __init__(self) -> None:
        self._digests: set[str] = set()

    def missing(self, parts: Iterable[ModelPart], tell: Callable[[int, int], None]) -> list[ModelPart]:
        """Return the parts that are missing. A part that changed on disk is logged, removed and counted as
        missing.

        ``tell`` is called with (hashed, total) bytes. Raises ModelError for a part that cannot be read.
        """
        parts = list(parts)
        unsure = [part for part in parts if part.digest not in self._digests and is_whole(part)]
        total, done = sum(part.num_bytes for part in unsure), 0

        def count(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            tell(done, total)

        for part in unsure:
            if not verify(part, count):
                _log.warning("%s was changed on disk and is fetched again", part.name)
        return [part for part in parts if not is_whole(part)]

    def add(self, parts: Iterable[ModelPart]) -> None:
        """Mark parts as verified that have just been received and compared."""
        self._digests.update(part.digest for part in parts)


class ReceivedModel:
    """Manage the folder of one model on this member; other processes of this user may share it."""

    def __init__(self, cache: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self.folder = cache / FOLDER / manifest.digest

    @classmethod
    def remembered(cls, cache: Path, digest: str) -> Manifest | None:
        """Return the manifest stored earlier; None if there is none, or if it is incomplete."""
        try:
            return Manifest.decode((cache / FOLDER / digest / _MANIFEST).read_bytes(), digest)
        except (OSError, ModelError):
            return None

    def file(self, name: str) -> ModelPart:
        """Return the part of a file beside the weights. Raises ModelError if the model has no file of that
        name.
        """
        entry = self.manifest.files.get(name)
        if entry is None:
            raise ModelError(
                f"the manifest {self.manifest.digest[:12]} has no {name}",
                hint="a GGUF file is not sent: give every member the file, `convoy join --model FILE`",
            )
        return ModelPart(name, self.folder / name, entry.num_bytes, entry.digest)

    def tensor(self, name: str) -> ModelPart:
        entry = self.manifest.tensors[name]
        start = start_tensor_digest(entry.dtype, entry.shape)
        return ModelPart(name, self._place(entry), entry.num_bytes, entry.digest, start)

    def source(self, name: str, config: ModelPart) -> ModelSource:
        """Describe the model as if all its tensors were here; missing ones can be described but not read.

        Raises ModelError if the configuration does not match these tensors.
        """
        described = {
            tensor: StoredTensor(tensor, self._place(entry), entry.dtype, entry.shape, 0, entry.num_bytes)
            for tensor, entry in self.manifest.tensors.items()
        }
        settings = read_config(config.place)
        source = ModelSource.described(name, self.folder, settings, described)
        check_tied_digests(source, {tensor: entry.digest for tensor, entry in self.manifest.tensors.items()})
        return source

    @contextmanager
    def open(self, watch: Callable[[], None]) -> Iterator[None]:
        """Create the folder, and lock it for writing while the block runs; see `parts.alone_in`."""
        with explained(self.folder, "made"):
            self.folder.parents[1].parent.mkdir(parents=True, exist_ok=True)
            for folder in (*reversed(self.folder.parents[:2]), self.folder, self.folder / _TENSORS):
                folder.mkdir(mode=0o700, exist_ok=True)
        with alone_in(self.folder, watch):
            self._keep_manifest()
            yield

    def require_room(self, parts: Iterable[ModelPart]) -> None:
        """Raise ModelError, with both numbers, if the disk has no room for ``parts``."""
        require_room(self.folder, parts)

    def _keep_manifest(self) -> None:
        encoded = self.manifest.encoded
        part = ModelPart(_MANIFEST, self.folder / _MANIFEST, len(encoded), self.manifest.digest)
        if not is_whole(part):
            with PartFile(part) as file:
                file.begin_anew()
                file.write(encoded)
                file.finish()

    def _place(self, entry: TensorEntry) -> Path:
        return self.folder / _TENSORS / entry.digest
