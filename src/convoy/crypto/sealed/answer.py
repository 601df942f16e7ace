"""An answer in sealed chunks: each once, in order, and the last marked, so that none can be left out.

The construction is that of `chunks` (STREAM): a key for this answer alone, and a nonce from the chunk's
number and whether it is the last. The key comes from the secret in the request, the request's hash and a
nonce of the provider. So no answer fits another request, and no two answers to one request share a key.
"""

from __future__ import annotations

import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from convoy.crypto.sealed.padding import most_unpadded, pad, unpad
from convoy.crypto.sealed.request import ANSWER_SECRET_BYTES
from convoy.errors import SealError

ANSWER_NONCE_BYTES = 32
MAX_CHUNK_BYTES = 1024 * 1024

_INFO = b"convoy sealed answer v1"
_LEAST_CHUNK = 256
_TAG_BYTES = 16
_MAX_CHUNKS = 2**48


def _key(secret: bytes, request_hash: bytes, nonce: bytes) -> AESGCM:
    if len(secret) != ANSWER_SECRET_BYTES or len(nonce) != ANSWER_NONCE_BYTES:
        raise SealError(
            f"an answer's secret of {len(secret)} and nonce of {len(nonce)} bytes, expected "
            f"{ANSWER_SECRET_BYTES} and {ANSWER_NONCE_BYTES}"
        )
    derived = HKDF(algorithm=SHA256(), length=32, salt=nonce, info=_INFO + request_hash).derive(secret)
    return AESGCM(derived)


def _nonce(index: int, last: bool) -> bytes:
    return index.to_bytes(11, "big") + bytes([last])


def most_chunk_bytes(sealed_bytes: int) -> int:
    """Return how many bytes of an answer a sealed chunk of that size may hold at most."""
    return most_unpadded(sealed_bytes - _TAG_BYTES)


class AnswerSealer:
    """Seal an answer at the provider. Each answer to a request needs a sealer of its own."""

    def __init__(self, secret: bytes, request_hash: bytes) -> None:
        self.nonce = secrets.token_bytes(ANSWER_NONCE_BYTES)
        self._aead = _key(secret, request_hash, self.nonce)
        self._index = 0
        self._ended = False

    def seal(self, chunk: bytes, *, last: bool = False) -> bytes:
        """Return the next sealed chunk. Raises `SealError` after the last, or for one over
        MAX_CHUNK_BYTES.
        """
        if self._ended or self._index >= _MAX_CHUNKS:
            raise SealError("this answer has ended")
        if len(chunk) > MAX_CHUNK_BYTES:
            raise SealError(f"a chunk has {len(chunk)} bytes, and the limit is {MAX_CHUNK_BYTES}")
        index, self._index, self._ended = self._index, self._index + 1, last
        return self._aead.encrypt(_nonce(index, last), pad(chunk, _LEAST_CHUNK), _INFO)


class AnswerOpener:
    """Open an answer at the asking side. After a failure it opens nothing more."""

    def __init__(self, secret: bytes, request_hash: bytes, nonce: bytes) -> None:
        self._aead = _key(secret, request_hash, nonce)
        self._index = 0
        # True once the last chunk was opened. Without it the answer is not complete.
        self.ended = False

    def open(self, sealed: bytes, *, last: bool) -> bytes:
        """Return the next chunk.

        Raises `SealError` if it is another one, was changed, or comes after the last.
        """
        if self.ended or self._index < 0:
            raise SealError("this answer has ended, or a chunk of it failed before")
        if len(sealed) > 2 * MAX_CHUNK_BYTES:
            raise SealError(f"a sealed chunk has {len(sealed)} bytes, and the limit is {2 * MAX_CHUNK_BYTES}")
        # -1 marks a failure until this chunk has opened.
        index, self._index = self._index, -1
        try:
            chunk = unpad(self._aead.decrypt(_nonce(index, last), sealed, _INFO))
        except (InvalidTag, ValueError):
            raise SealError(f"chunk {index} of an answer does not open: changed, moved or left out") from None
        self._index, self.ended = index + 1, last
        return chunk
