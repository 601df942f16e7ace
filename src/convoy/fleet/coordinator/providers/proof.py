"""Prove a coordinator to a provider that dials: its key, its address and its TLS certificate."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec

from convoy.crypto.certificate import certificate_fingerprint, from_pem
from convoy.crypto.identity import Identity
from convoy.errors import ConfigError, IdentityError
from convoy.wire.fleet.messages import PROTOCOL, ProviderChallenge, ProviderHello, challenge_bytes

_log = logging.getLogger(__name__)
_Stamp = tuple[int, int, int]


class PublicCertificate:
    """Hold the SHA-256 of the first certificate in a PEM file, and read the file again when it changes."""

    def __init__(self, file: Path) -> None:
        """Read the file. Raises `ConfigError` for a file that cannot be read, or holds no certificate."""
        self._file = file
        self._stamp = self._stamp_now()
        self._hash = self._read()

    @property
    def hash(self) -> bytes:
        """Return the newest hash. If the file cannot be read, the hash before stays."""
        try:
            stamp = self._stamp_now()
            if stamp != self._stamp:
                self._hash, self._stamp = self._read(), stamp
        except ConfigError as error:
            _log.warning("the public certificate is not read again: %s", error.message)
        return self._hash

    def _stamp_now(self) -> _Stamp:
        try:
            found = self._file.stat()
        except OSError as error:
            raise ConfigError(f"cannot read {self._file}: {error.strerror}") from None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> bytes:
        try:
            return certificate_fingerprint(from_pem(self._file.read_bytes()))
        except OSError as error:
            raise ConfigError(f"cannot read {self._file}: {error.strerror}") from None
        except IdentityError as error:
            raise ConfigError(f"{self._file}: {error.message}") from None


class CoordinatorProof:
    """Sign challenges. ``served`` is the hash of the certificate that this process serves with, or empty.

    ``public`` is the certificate of a TLS proxy in front, which providers see instead.
    """

    def __init__(
        self, identity: Identity, served: bytes = b"", public: PublicCertificate | None = None
    ) -> None:
        self._identity = identity
        self._served = served
        self._public = public

    @property
    def public_key(self) -> bytes:
        """Return the key by which providers know this coordinator."""
        return self._identity.public_key

    def challenge(self, hello: ProviderHello, registers: Sequence[int]) -> ProviderChallenge:
        """Return the signed answer to ``hello``, after its authority was checked to be this coordinator's."""
        certificate = self._served
        if hello.tls and self._public is not None:
            certificate = self._public.hash
        unsigned = ProviderChallenge(
            protocol=PROTOCOL,
            coordinator=b"" if hello.pinned else self.public_key,
            nonce=secrets.token_bytes(32),
            certificate=certificate,
            registers=list(registers),
        )
        signature = self._identity.sign(challenge_bytes(hello, unsigned))
        return msgspec.structs.replace(unsigned, signature=signature)
