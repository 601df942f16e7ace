"""A session's file as bytes: written whole or not at all, read at any place, sealed if there is a key.

The file is a prompt at rest, so only its owner may read it (0600). No other user may redirect the write: the
file is made beside its place under a random name, and renamed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from convoy.crypto.cipher import TAG_BYTES
from convoy.crypto.sealed.chunks import CHUNK_BYTES, FILE_ID_BYTES, SEALED_CHUNK_BYTES, ChunkCipher
from convoy.errors import SealError, SessionError

_CUT = "use a copy of the file: this one is incomplete"

SEALED_MAGIC = b"cnvysess"
_PREFIX_BYTES = len(SEALED_MAGIC) + FILE_ID_BYTES


class SessionWriter:
    """Write bytes in order; leaving the `with` without an error puts the file in its place.

    After an error there is no file. A file at ``path`` is replaced; a link there is replaced itself, never
    followed. Raises SessionError.
    """

    def __init__(self, path: Path, key: bytes | None) -> None:
        self._path = path
        self._key = key
        self._cipher: ChunkCipher | None = None
        self._held = bytearray()
        self._index = 0

    def __enter__(self) -> Self:
        file_id = secrets.token_bytes(FILE_ID_BYTES)
        if self._key is not None:
            self._cipher = _cipher(self._key, file_id)
        name = f".{self._path.name}.{secrets.token_hex(8)}"
        self._made = self._path.parent / name
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            self._file = os.fdopen(os.open(self._made, flags, 0o600), "wb")
        except OSError as error:
            raise _cannot("write", self._path, error) from error
        if self._cipher is not None:
            self._put(SEALED_MAGIC + file_id)
        return self

    def write(self, data: bytes | memoryview) -> None:
        if self._cipher is None:
            self._put(data)
            return
        self._held += data
        # Hold one chunk back: only the end of the file shows that a chunk is the last.
        while len(self._held) > CHUNK_BYTES:
            self._put(self._cipher.seal(self._index, bytes(self._held[:CHUNK_BYTES]), last=False))
            del self._held[:CHUNK_BYTES]
            self._index += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            # Before closing, because closing writes the rest once more, and fails again if the disk is full.
            self._made.unlink(missing_ok=True)
            self._close()

    def _finish(self) -> None:
        if self._cipher is not None:
            self._put(self._cipher.seal(self._index, bytes(self._held), last=True))
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._made.replace(self._path)
            directory = os.open(self._path.parent, os.O_RDONLY)
            try:
                # The directory too, so that the new name survives a crash.
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise _cannot("write", self._path, error) from error

    def _close(self) -> None:
        # All data was flushed, or its error was raised.
        with contextlib.suppress(OSError):
            self._file.close()

    def _put(self, data: bytes | memoryview) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise _cannot("write", self._path, error) from error


class SessionReader:
    """Read a file's bytes, and open sealed chunks on demand. ``size`` is their number.

    Raises SessionError for a path that is no regular file, a wrong or missing key, a key for a plain file, or
    a chunk that does not open.
    """

    def __init__(self, path: Path, key: bytes | None) -> None:
        self._path = path
        self._cipher: ChunkCipher | None = None
        # The index and bytes of the chunk opened last.
        self._kept: tuple[int, bytes] = (-1, b"")
        self._file: BinaryIO = os.fdopen(_open_regular(path), "rb")
        try:
            self._begin(key)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return exactly ``num_bytes`` from ``offset`` of the ``size`` on."""
        if not 0 <= offset <= offset + num_bytes <= self.size:
            raise SessionError(f"{self._path} is truncated: it has {self.size} bytes", hint=_CUT)
        if self._cipher is None:
            return self._at(offset, num_bytes)
        first, last = offset // CHUNK_BYTES, (offset + num_bytes - 1) // CHUNK_BYTES
        whole = b"".join(self._chunk(index) for index in range(first, last + 1))
        return whole[offset - first * CHUNK_BYTES :][:num_bytes]

    def _begin(self, key: bytes | None) -> None:
        self.size = self._file_bytes = os.fstat(self._file.fileno()).st_size
        prefix = self._at(0, min(_PREFIX_BYTES, self.size))
        if not prefix.startswith(SEALED_MAGIC):
            if key is not None:
                raise SessionError(
                    f"{self._path} is not sealed, and a key was given", hint="load it without a key"
                )
            return
        if key is None:
            raise SessionError(f"{self._path} is sealed", hint="give its key: --key FILE")
        rest = self._file_bytes - _PREFIX_BYTES
        self._num_chunks = -(-rest // SEALED_CHUNK_BYTES)
        self.size = rest - self._num_chunks * TAG_BYTES
        if self._num_chunks < 1 or rest - (self._num_chunks - 1) * SEALED_CHUNK_BYTES < TAG_BYTES:
            raise SessionError(f"{self._path} is truncated: it has {self._file_bytes} bytes", hint=_CUT)
        self._cipher = _cipher(key, prefix[len(SEALED_MAGIC) :])
        # Opening the last chunk proves that the end is not cut off, and that the key is right.
        self._chunk(self._num_chunks - 1)

    def _chunk(self, index: int) -> bytes:
        if self._kept[0] != index:
            assert self._cipher is not None
            start = _PREFIX_BYTES + index * SEALED_CHUNK_BYTES
            num_bytes = min(SEALED_CHUNK_BYTES, self._file_bytes - start)
            try:
                opened = self._cipher.open(
                    index, self._at(start, num_bytes), last=index == self._num_chunks - 1
                )
            except SealError as error:
                raise SessionError(
                    f"{self._path} does not open: {error.message}",
                    hint="is this the key file that it was saved with? a file of another machine needs that "
                    "machine's session.key: --key FILE",
                ) from error
            self._kept = (index, opened)
        return self._kept[1]

    def _at(self, offset: int, num_bytes: int) -> bytes:
        try:
            self._file.seek(offset)
            data = self._file.read(num_bytes)
        except OSError as error:
            raise _cannot("read", self._path, error) from error
        if len(data) != num_bytes:
            raise SessionError(f"{self._path} was cut off while it was read")
        return data


def is_sealed(path: Path) -> bool:
    """Return whether a session's file is sealed. Raises SessionError if it cannot be read."""
    with os.fdopen(_open_regular(path), "rb") as file:
        try:
            return file.read(len(SEALED_MAGIC)) == SEALED_MAGIC
        except OSError as error:
            raise _cannot("read", path, error) from error


def _cipher(key: bytes, file_id: bytes) -> ChunkCipher:
    try:
        return ChunkCipher(key, file_id)
    except SealError as error:
        raise SessionError(f"the session's key does not fit: {error.message}") from error


def _open_regular(path: Path) -> int:
    try:
        # Do not wait for a pipe's other end: pipes are refused below.
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        hint = "--save FILE writes one" if isinstance(error, FileNotFoundError) else None
        raise _cannot("read", path, error, hint) from error
    if stat.S_ISREG(os.fstat(opened).st_mode):
        return opened
    os.close(opened)
    raise SessionError(f"{path} is not a file")


def _cannot(verb: str, path: Path, error: OSError, hint: str | None = None) -> SessionError:
    return SessionError(f"cannot {verb} {path}: {(error.strerror or 'it failed').lower()}", hint=hint)
