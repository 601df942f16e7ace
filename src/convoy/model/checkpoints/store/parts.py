"""Parts of a model on their way to this disk: each has its name once it is whole and verified.

A part is written under its `.part` name, synced, compared with the digest that was named for it, and then
renamed. So what has a name is right, a broken connection or a crash loses no verified part, and half a part
is gone on with from its end.
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

Count = Callable[[int], None]  # bytes of a chunk that was looked at; what it raises ends the work

_READ_BYTES = 1 << 20
_LOOK_UP_S = 0.2
_SPARE_BYTES = 64 << 20  # left free on the disk


@dataclass(frozen=True, slots=True)
class ModelPart:
    """One tensor or file of a model, and where it will lie. ``start`` is hashed in front of its bytes.

    ``digest`` is hex SHA-256; empty where nobody named one, and then its size alone is compared.
    """

    name: str
    place: Path
    num_bytes: int
    digest: str
    start: bytes = b""


@contextmanager
def alone_in(folder: Path, watch: Callable[[], None]) -> Iterator[None]:
    """Nobody else of this machine writes in ``folder``, which is made (0700), as long as the block runs.

    ``watch`` is called now and then while another process does; what it raises ends the wait. Raises
    ModelError where the folder cannot be made.
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
        os.close(descriptor)  # which gives the lock back, as the end of the process does


def require_room(folder: Path, parts: Iterable[ModelPart]) -> None:
    """Raises ModelError, with both numbers, where the disk has not the room for ``parts``."""
    needed = sum(part.num_bytes - (_size(_half(part)) or 0) for part in parts)
    with explained(folder, "read"):
        free = shutil.disk_usage(folder).free
    if needed + _SPARE_BYTES > free:
        raise ModelError(
            f"{needed} bytes of weights are missing here, and the disk of {folder} has {free} free",
            hint="free some (`convoy cache` shows what is kept), or name another folder: --cache DIR, or "
            "cache in the [model] section",
        )


def is_whole(part: ModelPart) -> bool:
    """Whether it is here, by its size alone: its name came last."""
    return _size(part.place) == part.num_bytes


def verify(part: ModelPart, count: Count) -> bool:
    """Whether the bytes that are here are the part's; others are removed. ``count`` hears of each chunk."""
    digest = hashlib.sha256(part.start)
    with explained(part.place, "read"), part.place.open("rb", buffering=0) as file:
        _hash_into(digest, file, count)
    if digest.hexdigest() == part.digest:
        return True
    with explained(part.place, "removed"):
        part.place.unlink()
    return False


class PartFile:
    """One part on its way in; `finish` gives it its name. Left before that, what came stays as half of it."""

    def __init__(self, part: ModelPart, count: Count = lambda _num_bytes: None) -> None:
        """Opens what an earlier try left, and hashes it; ``count`` hears of each chunk of that.

        Raises ModelError, as every method does, naming file and part.
        """
        self.part = part
        self.resumed = 0  # bytes that are here from an earlier try
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
        """Bytes that are still to come."""
        return self.part.num_bytes - self.num_bytes

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
        """The digest of what is here."""
        return self._digest.hexdigest()

    def _explained(self, verb: str) -> contextlib.AbstractContextManager[None]:
        return explained(_half(self.part), f"{verb} for {self.part.name}")


@contextmanager
def explained(path: Path, what: str) -> Iterator[None]:
    """An OSError about ``path`` is a ModelError that names it and the reason."""
    try:
        yield
    except OSError as error:
        reason = (error.strerror or "unusable").lower()
        raise ModelError(
            f"{path} cannot be {what}: {reason}",
            hint="what came so far stays: mend it and start again, or name another folder with --cache",
        ) from error


def _half(part: ModelPart) -> Path:
    return part.place.with_name(f"{part.place.name}.part")


def _size(path: Path) -> int | None:
    """None for what is not there."""
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
