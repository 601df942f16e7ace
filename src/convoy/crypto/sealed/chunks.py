"""Seal a file in chunks, so that it can be written and read in pieces: the STREAM construction.

Source: Hoang, Reyhanitabar, Rogaway and Vizár, "Online Authenticated-Encryption and its Nonce-Reuse
Misuse-Resistance" (2015), as age uses it. Every file has a random id. The file's own key is derived from
the owner's key and that id. A chunk's nonce is its number (11 bytes, big-endian) and whether it is the
last (1 byte). So no chunk can be left out, doubled, moved, cut off or taken from another file.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from convoy.crypto.cipher import TAG_BYTES
from convoy.errors import SealError

# Bytes of plaintext. Only the last chunk may have fewer.
CHUNK_BYTES = 64 * 1024
SEALED_CHUNK_BYTES = CHUNK_BYTES + TAG_BYTES
FILE_ID_BYTES = 16
FILE_KEY_BYTES = 32

_INFO = b"convoy session file v1"


class ChunkCipher:
    """Seal and open the chunks of one file. ``key``: FILE_KEY_BYTES of the owner's; ``file_id``: random."""

    def __init__(self, key: bytes, file_id: bytes) -> None:
        if len(key) != FILE_KEY_BYTES or len(file_id) != FILE_ID_BYTES:
            raise SealError(
                f"a key of {len(key)} and an id of {len(file_id)} bytes, "
                f"expected {FILE_KEY_BYTES} and {FILE_ID_BYTES}"
            )
        derived = HKDF(algorithm=SHA256(), length=32, salt=file_id, info=_INFO).derive(key)
        self._aead = AESGCM(derived)
        self._aad = _INFO + file_id

    def seal(self, index: int, chunk: bytes, *, last: bool) -> bytes:
        """Return the sealed chunk, TAG_BYTES longer than ``chunk``.

        No index may be used twice under one file id.
        """
        assert len(chunk) == CHUNK_BYTES or (last and len(chunk) <= CHUNK_BYTES), "a short chunk is the last"
        return self._aead.encrypt(_nonce(index, last), chunk, self._aad)

    def open(self, index: int, sealed: bytes, *, last: bool) -> bytes:
        """Return the chunk. Raises `SealError` for another key, file or place, and for changed bytes."""
        try:
            return self._aead.decrypt(_nonce(index, last), sealed, self._aad)
        except (InvalidTag, ValueError):
            raise SealError(
                f"chunk {index} does not open: another key, or it was changed or cut off"
            ) from None


def _nonce(index: int, last: bool) -> bytes:
    return index.to_bytes(11, "big") + bytes([last])
