"""Seal and open frames: one key and one counter per direction, and a ratchet that both ends turn at the
same frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cryptography.exceptions import InvalidTag

from convoy.crypto.cipher import TAG_BYTES, Aead, Cipher
from convoy.crypto.handshake import Secrets
from convoy.crypto.keys import Secret, next_secret, traffic_key, wipe
from convoy.errors import SealError

Bytes = bytes | bytearray | memoryview

MAX_SEQUENCE = 2**63


@dataclass(frozen=True, slots=True)
class SealLimits:
    """Limit the use of one key before the ratchet turns.

    This is part of the protocol: both ends must agree on it.
    """

    max_records: int = 2**22
    max_bytes: int = 2**34


class FrameSealer(Protocol):
    """Seal a link's frames. The product has one implementation, `Sealer`."""

    sequence: int

    def seal_into(self, header: Bytes, plaintext: Bytes, out: memoryview) -> None: ...

    def wipe(self) -> None: ...


class FrameOpener(Protocol):
    """Open a link's frames. The product has one implementation, `Opener`."""

    sequence: int

    def open_into(self, sequence: int, header: Bytes, sealed: Bytes, out: memoryview) -> None: ...

    def wipe(self) -> None: ...


class _Key:
    """Hold the current AEAD key of one direction.

    The nonce is (ratchet turn, sequence). Neither ever goes back, so no nonce repeats.
    """

    def __init__(self, secret: Secret, cipher: Cipher, limits: SealLimits) -> None:
        self._secret = bytearray(secret)
        self._cipher = cipher
        self._limits = limits
        self._records = 0
        self._bytes = 0
        self.turn = 0
        self.aead = self._make()
        self.prefix = bytes(4)

    def count(self, num_bytes: int) -> None:
        """Count a frame that was sealed or opened, and turn the ratchet at the limit.

        Both ends have counted the same frames, so both turn here or neither.
        """
        self._records += 1
        self._bytes += num_bytes
        if self._records >= self._limits.max_records or self._bytes >= self._limits.max_bytes:
            self._ratchet()

    def _ratchet(self) -> None:
        # The old secret is wiped at once, so that a later break-in cannot open earlier frames.
        old = self._secret
        self._secret = next_secret(old)
        wipe(old)
        self.turn += 1
        self.aead = self._make()
        self.prefix = self.turn.to_bytes(4, "big")
        self._records = 0
        self._bytes = 0

    def _make(self) -> Aead:
        key = traffic_key(self._secret)
        try:
            return self._cipher.make(key)
        finally:
            wipe(key)

    def wipe(self) -> None:
        """Overwrite the secret for good, and drop the cipher, which makes OpenSSL clear its copy."""
        wipe(self._secret)
        if hasattr(self, "aead"):
            del self.aead


class Sealer:
    """Seal the frames of one direction, in order. Not for two threads at once: the link's sender owns it."""

    def __init__(self, secret: Secret, cipher: Cipher, limits: SealLimits | None = None) -> None:
        self._key = _Key(secret, cipher, limits or SealLimits())
        self.sequence = 0

    @property
    def turn(self) -> int:
        """Return how many times the ratchet has turned."""
        return self._key.turn

    def seal_into(self, header: Bytes, plaintext: Bytes, out: memoryview) -> None:
        """Seal under ``self.sequence`` into ``out``, which is TAG_BYTES longer than ``plaintext``, and
        count on.

        Raises `SealError` once this direction has ended.
        """
        sequence = self.sequence
        if sequence >= MAX_SEQUENCE:
            raise SealError("this direction has ended, or has used up its sequence numbers")
        # Counted first: if a later line fails, the number is lost, but it is never used twice.
        self.sequence = sequence + 1
        key = self._key
        key.aead.encrypt_into(key.prefix + sequence.to_bytes(8, "big"), plaintext, header, out)
        key.count(len(out))

    def wipe(self) -> None:
        """End sealing for good. Call it on the sealing thread, or once no thread seals any more."""
        self.sequence = MAX_SEQUENCE
        self._key.wipe()


class Opener:
    """Open the frames of one direction, each exactly once and in order.

    After a failure it opens nothing more.
    """

    def __init__(self, secret: Secret, cipher: Cipher, limits: SealLimits | None = None) -> None:
        self._key = _Key(secret, cipher, limits or SealLimits())
        self._failed = False
        self.sequence = 0

    @property
    def turn(self) -> int:
        """Return how many times the ratchet has turned."""
        return self._key.turn

    def open_into(self, sequence: int, header: Bytes, sealed: Bytes, out: memoryview) -> None:
        """Open into ``out``, which is TAG_BYTES shorter than ``sealed``.

        Raises `SealError`; then ``out`` holds no usable bytes.
        """
        if self._failed:
            raise SealError("this direction has ended, or a frame of it failed before")
        # TLS below keeps the order, so any other number means a replayed or missing frame.
        if sequence != self.sequence:
            self._failed = True
            raise SealError(
                f"frame {sequence} came where {self.sequence} was expected: replayed or out of order"
            )
        key = self._key
        try:
            key.aead.decrypt_into(key.prefix + sequence.to_bytes(8, "big"), sealed, header, out)
        except InvalidTag:
            self._failed = True
            raise SealError(
                f"frame {sequence} does not open: it was changed, or is of another link"
            ) from None
        # Only a frame that opened moves the counter and the ratchet, as at the sending end.
        self.sequence = sequence + 1
        key.count(len(sealed))

    def wipe(self) -> None:
        """End opening for good. Call it on the opening thread, or once no thread opens any more."""
        self._failed = True
        self._key.wipe()


def make_sealing(secrets: Secrets, limits: SealLimits) -> tuple[Sealer, Opener]:
    """Return sealer and opener of one end. They copy the traffic secrets, and those in ``secrets`` are
    wiped.
    """
    sealer = Sealer(secrets.send, secrets.cipher, limits)
    opener = Opener(secrets.receive, secrets.cipher, limits)
    wipe(secrets.send)
    wipe(secrets.receive)
    return sealer, opener


__all__ = ["TAG_BYTES", "FrameOpener", "FrameSealer", "SealLimits", "Opener", "Sealer", "make_sealing"]
