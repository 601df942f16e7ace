"""Compute the digests of this machine's own files on several threads, and remember them for the next start.

Remembered digests are keyed by a file's path, size, both times of change and inode. They never vouch for
bytes from another member: those are hashed as they arrive.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from convoy.errors import ModelError
from convoy.model.checkpoints.checkpoint import StoredTensor, file_bytes
from convoy.model.checkpoints.manifest import (
    FILES,
    MAX_FILE_BYTES,
    FileEntry,
    Manifest,
    TensorEntry,
    start_tensor_digest,
)
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.synthetic import describe_values
from convoy.model.checkpoints.tied import check_tied_digests

_READABLE = "check that you may read the file"

HashProgress = Callable[[int, int], None]

_CHUNK_BYTES = 1 << 20
_LOOK_UP_S = 0.2
# a file changed this recently may change again within one tick of its clock
_SETTLED_NS = 2 * 10**9
_MAX_REMEMBERED_BYTES = 64 << 20
_VERSION = 2


@dataclass(frozen=True, slots=True)
class Hashing:
    """Hold the settings by which a process hashes files.

    ``cache`` None remembers nothing for the next process; ``num_threads`` 0 uses all cores. ``known`` holds
    the key and the tensors' digests of each file that this process has hashed.
    """

    cache: Path | None = None
    num_threads: int = 0
    now_ns: Callable[[], int] = field(default=time.time_ns, compare=False)
    known: dict[Path, tuple[list[int], dict[str, str]]] = field(default_factory=dict, compare=False)

    @property
    def threads(self) -> int:
        return min(8, self.num_threads or os.cpu_count() or 1)


def make_manifest(source: ModelSource, hashing: Hashing, progress: HashProgress | None = None) -> Manifest:
    """Return the manifest of a model that is complete on this machine.

    ``progress`` is called with (hashed, total) bytes, and its exceptions end the work. Raises ModelError for
    a file that cannot be read or is truncated, and for an output matrix that differs from the embedding
    although config.json ties them.
    """
    tensors = list(source.tensors.values())
    digests = tensor_digests(source, tensors, hashing, progress)
    check_tied_digests(source, digests)
    entries = {t.name: TensorEntry(t.dtype, t.shape, t.num_bytes, digests[t.name]) for t in tensors}
    return Manifest(entries, {} if source.seed is not None else _file_entries(source))


def tensor_digests(
    source: ModelSource,
    tensors: Sequence[StoredTensor],
    hashing: Hashing,
    progress: HashProgress | None = None,
) -> dict[str, str]:
    """Return the hex SHA-256 of each of these tensors of ``source``, by name; see `make_manifest`."""
    if source.seed is not None:
        return {tensor.name: describe_values(tensor, source.seed) for tensor in tensors}
    found: dict[str, str] = {}
    files: dict[Path, _Remembered] = {}
    for path in {tensor.path for tensor in tensors}:
        files[path] = _Remembered.load(path, hashing)
    missing = []
    for tensor in tensors:
        digest = files[tensor.path].digests.get(tensor.name)
        if digest is None:
            missing.append(tensor)
        else:
            found[tensor.name] = digest
    fresh = _Pass(missing, hashing.threads, progress).run()
    for path, remembered in files.items():
        remembered.save({t.name: fresh[t.name] for t in missing if t.path == path})
    return found | fresh


def hash_tensor(
    tensor: StoredTensor, over: threading.Event | None = None, count: Callable[[int], None] | None = None
) -> str:
    """Return the digest of one tensor, from its file.

    ``count`` is called with the size of each chunk; ``over`` ends the work early. Raises ModelError naming
    file and tensor.
    """
    digest = hashlib.sha256(start_tensor_digest(tensor.dtype, tensor.shape))
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, max(1, tensor.num_bytes))))
    left = tensor.num_bytes
    try:
        with tensor.path.open("rb", buffering=0) as file:
            file.seek(tensor.offset)
            while left and not (over is not None and over.is_set()):
                num_read = file.readinto(buffer[: min(left, len(buffer))])
                if not num_read:
                    raise ModelError(
                        f"{tensor.path} is truncated: {left} bytes of {tensor.name} are missing",
                        hint="fetch the file again: it is incomplete, or another program changed it",
                    )
                digest.update(buffer[:num_read])
                left -= num_read
                if count is not None:
                    count(num_read)
    except OSError as error:
        reason = (error.strerror or "unreadable").lower()
        raise ModelError(
            f"{tensor.path} cannot be read: {reason}, at {tensor.name}", hint=_READABLE
        ) from error
    return digest.hexdigest()


def _file_entries(source: ModelSource) -> dict[str, FileEntry]:
    directory = source.path
    files = dict(source.own_files)
    if not source.is_one_file:
        names = [name for name in FILES if (directory / name).is_file()]
        files = {name: file_bytes(directory / name, MAX_FILE_BYTES) for name in names}
    return {name: FileEntry(len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()}


class _Pass:
    """Hash tensors on several threads, once. Hashing and reading release the GIL, so other threads go on."""

    def __init__(
        self, tensors: Sequence[StoredTensor], num_threads: int, progress: HashProgress | None
    ) -> None:
        self._tensors = tensors
        self._num_threads = num_threads
        self._progress = progress
        self._total = sum(tensor.num_bytes for tensor in tensors)
        self._lock = threading.Lock()
        self._done = 0
        self._over = threading.Event()

    def run(self) -> dict[str, str]:
        if not self._tensors:
            return {}
        pool = ThreadPoolExecutor(self._num_threads, "hash")
        try:
            # hash the largest first, so that no thread is left alone with it at the end
            ordered = sorted(self._tensors, key=lambda tensor: -tensor.num_bytes)
            hashes = {pool.submit(hash_tensor, one, self._over, self._count): one.name for one in ordered}
            self._wait(hashes)
            return {name: hash_.result() for hash_, name in hashes.items()}
        finally:
            self._over.set()
            pool.shutdown(cancel_futures=True)

    def _wait(self, hashes: Iterable[Future[str]]) -> None:
        left = set(hashes)
        while left:
            done, left = wait(left, _LOOK_UP_S, FIRST_EXCEPTION)
            for one in done:
                one.result()
            if self._progress is not None:
                self._progress(self._done, self._total)

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes


class _Remembered:
    """Hold the known digests of one file's tensors, valid while the file is the one that was hashed."""

    def __init__(self, path: Path, key: list[int], hashing: Hashing, digests: dict[str, str]) -> None:
        self.digests: Mapping[str, str] = digests
        self._path = path
        self._key = key
        self._hashing = hashing

    @classmethod
    def load(cls, path: Path, hashing: Hashing) -> _Remembered:
        """Load the remembered digests; none if they are unreadable or of another version of the file.

        Raises ModelError if the file itself is missing.
        """
        whole, key = path.resolve(), _key(path)
        known_key, digests = hashing.known.get(whole, ([], {}))
        if known_key != key:
            digests = {} if hashing.cache is None else _stored_digests(hashing.cache, whole, key)
        return cls(whole, key, hashing, digests)

    def save(self, fresh: Mapping[str, str]) -> None:
        """Save fresh digests as far as possible. An unwritable folder only costs the next start its time."""
        whole = {**self.digests, **fresh}
        self._hashing.known[self._path] = (self._key, whole)
        cache = self._hashing.cache
        if (
            cache is None
            or not fresh
            or self._hashing.now_ns() - max(self._key[1], self._key[3]) < _SETTLED_NS
        ):
            return
        with contextlib.suppress(OSError, ModelError):
            # skip the file if it changed while it was hashed
            if _key(self._path) == self._key:
                _store_digests(cache, self._path, self._key, whole)


def _stored_digests(cache: Path, path: Path, key: list[int]) -> dict[str, str]:
    try:
        said = json.loads(file_bytes(_file_for(cache, path), _MAX_REMEMBERED_BYTES))
        digests = {str(tensor): str(digest) for tensor, digest in said["digests"].items()}
        same = [said["version"], said["path"], said["key"]] == [_VERSION, str(path), key]
    except (ModelError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    return digests if same else {}


def _store_digests(cache: Path, path: Path, key: list[int], digests: Mapping[str, str]) -> None:
    said = {"version": _VERSION, "path": str(path), "key": key, "digests": dict(digests)}
    target = _file_for(cache, path)
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=".digests.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(json.dumps(said).encode())
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink()
        raise


def _file_for(cache: Path, path: Path) -> Path:
    name = hashlib.sha256(str(path).encode(errors="surrogateescape")).hexdigest()[:32]
    return cache / "digests" / f"{name}.json"


def _key(path: Path) -> list[int]:
    try:
        status = path.stat()
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read: {(error.strerror or 'unreadable').lower()}", hint=_READABLE
        ) from error
    # include the time of any change (ctime) too: mtime can be set back, by `cp -p` or by hand
    return [status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns]
