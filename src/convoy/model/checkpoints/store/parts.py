"""Write parts of a model to this disk: each gets its final name once it is complete and verified.

A part is written under its `.part` name, synced, compared with its expected digest, and then renamed. A file
with a final name is therefore correct. A broken connection or a crash loses no verified part, and an
incomplete part is resumed at its end.
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

# called with the bytes of each chunk read; its exceptions end the work
Count = Callable[[int], None]

_READ_BYTES = 1 << 20
_LOOK_UP_S = 0.2
# bytes to leave free on the disk
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ModelPart:
    """Describe one tensor or file of a model and its place on disk.

    ``digest`` is the hex SHA-256 over ``start`` and the part's bytes. If it is empty, only the size is
    compared.
    """

    name: str
    place: Path
    num_bytes: int
    digest: str
    start: bytes = b""


@contextmanager
def alone_in(folder: Path, watch: Callable[[], None]) -> Iterator[None]:
    """Lock ``folder`` against other processes of this machine while the block runs; create it (0700) if
    needed.

    ``watch`` is called repeatedly while another process holds the lock; its exceptions end the wait. Raises
    ModelError if the folder cannot be created.
    """
    with explained(folder, "made"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        while not _locked(descriptor):
            watch()
            time.sleep(_LOOK_UP_S)
        yield
    finally:
        # closing releases the lock, as the end of the process would
        os.close(descriptor)


def require_room(folder: Path, parts: Iterable[ModelPart]) -> None:
    """Raise ModelError, with both numbers, if the disk has no room for ``parts``."""
    needed = sum(part.num_bytes - (_size(_half(part)) or 0) for part in parts)
    with explained(folder, "read"):
        free = shutil.disk_usage(folder).free
    if needed + _SPARE_BYTES > free:
        raise ModelError(
            f"{needed} bytes of weights are missing here, and the disk of {folder} has {free} free",
            hint="free some (`convoy models` shows what is kept), or name another folder: --cache DIR, or "
            "cache in the [model] section",
        )


def is_whole(part: ModelPart) -> bool:
    """Tell whether a part is complete, by its size alone: a part gets its name only after verification."""
    return _size(part.place) == part.num_bytes


def verify(part: ModelPart, count: Count) -> bool:
    """Tell whether the bytes on disk match the part's digest; remove the file if not.

    ``count`` is called with the size of each chunk.
    """
    digest = hashlib.sha256(part.start)
    with explained(part.place, "read"), part.place.open("rb", buffering=0) as file:
        _hash_into(digest, file, count)
    if digest.hexdigest() == part.digest:
        return True
    with explained(part.place, "removed"):
        part.place.unlink()
    return False


class PartFile:
    """Write one part; `finish` gives it its name. Closed before that, it stays as an incomplete part."""

    def __init__(self, part: ModelPart, count: Count = lambda _num_bytes: None) -> None:
        """Open an earlier attempt's bytes, if any, and hash them; ``count`` is called with the size of each
        chunk.

        Raises ModelError, as every method does, naming file and part.
        """
        self.part = part
        # bytes kept from an earlier attempt
        self.resumed = 0
        self._digest = hashlib.sha256(part.start)
        with self._explained("opened"):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            self._file: IO[bytes] = os.fdopen(os.open(_half(part), flags, 0o600), "r+b", buffering=0)
        try:
            self._take_up(count)
        except BaseException:
            self.close()
            raise
        self.num_bytes = self.resumed

    def _take_up(self, count: Count) -> None:
        with self._explained("read"):
            self.resumed = os.fstat(self._file.fileno()).st_size
            if self.resumed > self.part.num_bytes:
                self.begin_anew()
            else:
                _hash_into(self._digest, self._file, count)

    def __enter__(self) -> PartFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def left(self) -> int:
        """Return the number of bytes still missing."""
        return self.part.num_bytes - self.num_bytes

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()

    def begin_anew(self) -> None:
        """Discard the bytes of an earlier attempt."""
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
        """Return True, with the part synced and under its name, if its bytes are the expected ones.

        Otherwise discard all of its bytes and return False.
        """
        if self.num_bytes != self.part.num_bytes or self.part.digest not in {"", self.found}:
            self.begin_anew()
            return False
        with self._explained("written"):
            os.fsync(self._file.fileno())
            _half(self.part).replace(self.part.place)
            _sync(self.part.place.parent)
        self.close()
        return True

    @property
    def found(self) -> str:
        """Return the hex digest of the bytes written so far."""
        return self._digest.hexdigest()

    def _explained(self, verb: str) -> contextlib.AbstractContextManager[None]:
        return explained(_half(self.part), f"{verb} for {self.part.name}")


@contextmanager
def explained(path: Path, what: str) -> Iterator[None]:
    """Turn an OSError about ``path`` into a ModelError that names it and the reason."""
    try:
        yield
    except OSError as error:
        reason = (error.strerror or "unusable").lower()
        raise ModelError(
            f"{path} cannot be {what}: {reason}",
            hint="received bytes are kept: fix it and start again, or name another folder: --cache, "
            "or cache under [model]",
        ) from error


def _half(part: ModelPart) -> Path:
    return part.place.with_name(f"{part.place.name}.part")


def _size(path: Path) -> int | None:
    """Return the file's size in bytes, or None if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def _hash_into(digest: hashlib._Hash, file: IO[bytes], count: Count) -> None:
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
