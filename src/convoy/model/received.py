"""A model whose files come from another member: a private folder of parts, each named once it is verified.

    CACHE/models/<digest of the manifest>/manifest.json
                                          config.json          as `transformers` wants to find it
                                          tensors/<digest>     the bytes of one tensor
                                          tensors/<digest>.part   not whole yet, or not verified

A part is written under its `.part` name, synced, compared with the manifest, and then renamed. So what has a
name is right, a broken link or a crash loses no verified part, and half a part is gone on with from its end.
No name in here is one that a peer chose.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from convoy.errors import ModelError
from convoy.model.checkpoint import StoredTensor
from convoy.model.manifest import Manifest, TensorEntry, start_tensor_digest
from convoy.model.source import ModelSource, digest_of, read_config
from convoy.plan.spec import ModelSpec

_READ_BYTES = 1 << 20
_LOOK_UP_S = 0.2
_SPARE_BYTES = 64 << 20  # left free on the disk
_MANIFEST = "manifest.json"
_TENSORS = "tensors"


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor or file of a model, and where it will lie. ``start`` is hashed in front of its bytes."""

    name: str
    place: Path
    num_bytes: int
    digest: str
    start: bytes = b""


class ReceivedModel:
    """The folder of one model on this member; other processes of this user may use the same one."""

    def __init__(self, cache: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self.folder = cache / "models" / manifest.digest

    @classmethod
    def remembered(cls, cache: Path, digest: str) -> Manifest | None:
        """The manifest that came here earlier; None if none did, or it is not whole."""
        try:
            return Manifest.decode((cache / "models" / digest / _MANIFEST).read_bytes(), digest)
        except (OSError, ModelError):
            return None

    def file(self, name: str) -> Part:
        """A file beside the weights. Raises ModelError if the model has none by that name."""
        entry = self.manifest.files.get(name)
        if entry is None:
            raise ModelError(f"the manifest {self.manifest.digest[:12]} has no {name}")
        return Part(name, self.folder / name, entry.num_bytes, entry.digest)

    def tensor(self, name: str) -> Part:
        entry = self.manifest.tensors[name]
        start = start_tensor_digest(entry.dtype, entry.shape)
        return Part(name, self._place(entry), entry.num_bytes, entry.digest, start)

    def source(self, name: str, config: Part) -> ModelSource:
        """The model as if all its tensors were here; those that are not can be described, and not read."""
        described = {
            tensor: StoredTensor(tensor, self._place(entry), entry.dtype, entry.shape, 0, entry.num_bytes)
            for tensor, entry in self.manifest.tensors.items()
        }
        settings = read_config(config.place)
        spec = ModelSpec.from_config(settings, name, {tensor: t.shape for tensor, t in described.items()})
        return ModelSource(name, self.folder, settings, spec, digest_of(settings, described), described)

    @contextmanager
    def open(self, watch: Callable[[], None]) -> Iterator[None]:
        """Make the folder, and write in it alone as long as the block runs.

        ``watch`` is called now and then while another process does; what it raises ends the wait. Raises
        ModelError where the folder cannot be made.
        """
        with _explained(self.folder, "made"):
            self.folder.parents[1].parent.mkdir(parents=True, exist_ok=True)
            for folder in (*reversed(self.folder.parents[:2]), self.folder, self.folder / _TENSORS):
                folder.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            while not _locked(descriptor):
                watch()
                time.sleep(_LOOK_UP_S)
            self._keep_manifest()
            yield
        finally:
            os.close(descriptor)  # which gives the lock back, as the end of the process does

    def require_room(self, parts: Iterable[Part]) -> None:
        """Raises ModelError, with both numbers, where the disk has not the room for ``parts``."""
        needed = sum(part.num_bytes - (_size(_half(part)) or 0) for part in parts)
        with _explained(self.folder, "read"):
            free = shutil.disk_usage(self.folder).free
        if needed + _SPARE_BYTES > free:
            raise ModelError(
                f"{needed} bytes of weights are missing here, and the disk of {self.folder} has {free} free",
                hint="free some, or name another folder: `convoy join --cache DIR`",
            )

    def _keep_manifest(self) -> None:
        encoded = self.manifest.encoded
        part = Part(_MANIFEST, self.folder / _MANIFEST, len(encoded), self.manifest.digest)
        if _size(part.place) != part.num_bytes:
            with PartFile(part) as file:
                file.begin_anew()
                file.write(encoded)
                file.finish()

    def _place(self, entry: TensorEntry) -> Path:
        return self.folder / _TENSORS / entry.digest


def is_whole(part: Part) -> bool:
    """Whether it is here, by its size alone: its name came last."""
    return _size(part.place) == part.num_bytes


def verify(part: Part, count: Callable[[int], None]) -> bool:
    """Whether the bytes that are here are the part's; others are removed. ``count`` hears of each chunk."""
    digest = hashlib.sha256(part.start)
    with _explained(part.place, "read"), part.place.open("rb", buffering=0) as file:
        _hash_into(digest, file, count)
    if digest.hexdigest() == part.digest:
        return True
    with _explained(part.place, "removed"):
        part.place.unlink()
    return False


class PartFile:
    """One part on its way in; `finish` gives it its name. Left before that, what came stays as half of it."""

    def __init__(self, part: Part) -> None:
        """Opens what an earlier try left. Raises ModelError, as every method does, naming file and part."""
        self.part = part
        self.resumed = 0  # bytes that are here from an earlier try
        self._digest = hashlib.sha256(part.start)
        with self._explained("opened"):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            self._file: IO[bytes] = os.fdopen(os.open(_half(part), flags, 0o600), "r+b", buffering=0)
            self.resumed = os.fstat(self._file.fileno()).st_size
            if self.resumed > part.num_bytes:
                self.begin_anew()
            else:
                _hash_into(self._digest, self._file, lambda _num_bytes: None)
        self.num_bytes = self.resumed

    def __enter__(self) -> PartFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()

    def begin_anew(self) -> None:
        """Forget what an earlier try left."""
        with self._explained("written"):
            self._file.seek(0)
            self._file.truncate()
        self._digest = hashlib.sha256(self.part.start)
        self.num_bytes = self.resumed = 0

    def write(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        with self._explained("written"):
            while left:
                left = left[self._file.write(left) :]
        self._digest.update(data)
        self.num_bytes += len(data)

    def finish(self) -> bool:
        """Whether what is here is the part; then it is on disk, under its name, when this returns.

        If it is not, nothing of it stays.
        """
        if self.num_bytes != self.part.num_bytes or self._digest.hexdigest() != self.part.digest:
            self.begin_anew()
            return False
        with self._explained("written"):
            os.fsync(self._file.fileno())
            _half(self.part).replace(self.part.place)
            _sync(self.part.place.parent)
        self.close()
        return True

    def _explained(self, verb: str) -> contextlib.AbstractContextManager[None]:
        return _explained(_half(self.part), f"{verb} for {self.part.name}")


def _half(part: Part) -> Path:
    return part.place.with_name(f"{part.place.name}.part")


def _size(path: Path) -> int | None:
    """None for what is not there."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def _hash_into(digest: hashlib._Hash, file: IO[bytes], count: Callable[[int], None]) -> None:
    while data := file.read(_READ_BYTES):
        digest.update(data)
        count(len(data))


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _explained(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = (error.strerror or "unusable").lower()
        raise ModelError(
            f"{path} cannot be {what}: {reason}",
            hint="what came so far stays: mend it and start again, or name another folder with --cache",
        ) from error
