"""A member's identity: an Ed25519 identity key, and a TLS certificate with a different key on purpose."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from convoy.crypto.certificate import certificate_key, from_pem, make_certificate, to_pem
from convoy.crypto.cipher import NONCE_BYTES
from convoy.crypto.key_envelope import (
    COST,
    SALT_BYTES,
    ScryptCost,
    check_envelope,
    is_envelope,
    open_key,
    seal_key,
)
from convoy.crypto.keyfile import (
    check_private_directory,
    make_private_directory,
    read_private,
    replace_private,
    write_private,
)
from convoy.errors import HandshakeError, IdentityError

_RESTORE = "restore the file from a backup, or make new keys with `convoy identity new`"

IDENTITY_KEY = "identity.key"
TLS_KEY = "tls.key"
TLS_CERTIFICATE = "tls.crt"
OPERATOR_KEY = "operator.key"


class Identity:
    """Hold a member's own keys.

    Call ``save`` once, and ``load`` at every start. The private keys never leave the object.
    """

    def __init__(
        self,
        key: Ed25519PrivateKey,
        tls_key: Ed25519PrivateKey,
        certificate_der: bytes,
        directory: Path | None = None,
    ) -> None:
        self._key = key
        self._tls_key = tls_key
        self._directory = directory
        self.public_key = _public_bytes(key)
        self.tls_certificate_der = certificate_der
        if _public_bytes(tls_key) != certificate_key(certificate_der):
            raise IdentityError(f"{TLS_CERTIFICATE} is not the certificate of {TLS_KEY}", hint=_RESTORE)
        # With one key for both, a TLS signature could be taken for one of the identity.
        if _public_bytes(tls_key) == self.public_key:
            raise IdentityError(
                "the TLS key and the identity key are the same key, and must differ", hint=_RESTORE
            )

    @classmethod
    def generate(cls) -> Identity:
        """Return new keys, which are in memory only until ``save``."""
        tls_key = Ed25519PrivateKey.generate()
        return cls(Ed25519PrivateKey.generate(), tls_key, make_certificate(tls_key))

    @classmethod
    def load(cls, directory: Path) -> Identity:
        """Read the three files.

        Raises `IdentityError` if a file is missing, malformed or readable by others, or if others may
        enter the directory.
        """
        key = _load_key(directory / IDENTITY_KEY)
        check_private_directory(directory)
        tls_key = _load_key(directory / TLS_KEY)
        return cls(key, tls_key, from_pem(read_private(directory / TLS_CERTIFICATE)), directory)

    def save(self, directory: Path) -> None:
        """Write the three files, 0600 in a 0700 directory.

        Raises `IdentityError` rather than overwrite a key.
        """
        make_private_directory(directory)
        write_private(directory / IDENTITY_KEY, _private_pem(self._key))
        write_private(directory / TLS_KEY, _private_pem(self._tls_key))
        write_private(directory / TLS_CERTIFICATE, to_pem(self.tls_certificate_der))
        self._directory = directory

    @property
    def tls_files(self) -> tuple[Path, Path]:
        """Return the certificate and key files: `ssl` can read keys only from files."""
        if self._directory is None:
            raise IdentityError("the identity is not on disk yet", hint="save it before opening a TLS link")
        return self._directory / TLS_CERTIFICATE, self._directory / TLS_KEY

    def sign(self, data: bytes) -> bytes:
        """Return an Ed25519 signature (64 bytes) under the identity key.

        Callers put a label before the data that they sign.
        """
        return self._key.sign(data)

    def sign_with_tls_key(self, data: bytes) -> bytes:
        """Return an Ed25519 signature (64 bytes) under the TLS key, with which a newcomer proves that key
        too.

        TLS 1.3 signs nothing that begins with a length, so no signature of one kind passes as the other.
        """
        return self._tls_key.sign(data)


class OperatorKey:
    """Hold the key that signs rosters. It stays with the operator; members know only its public half.

    Its file is PEM, or with a passphrase the envelope of `key_envelope`. ``cost`` is for tests, which
    cannot spend 0.3 s and 128 MiB on every file: no file and no command sets it.
    """

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public_key = _public_bytes(key)

    @classmethod
    def generate(cls) -> OperatorKey:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(
        cls, directory: Path, passphrase: Callable[[], str] | None = None, *, cost: ScryptCost = COST
    ) -> OperatorKey:
        """Read ``operator.key``. Raises the errors of `Identity.load`.

        ``passphrase`` is called if the file is encrypted. A wrong one is an `IdentityError`.
        """
        path = directory / OPERATOR_KEY
        data = read_private(path)
        check_private_directory(directory)
        if not is_envelope(data):
            return cls(_key_from_pem(data, path))
        try:
            check_envelope(data, cost)
            if passphrase is None:
                raise IdentityError("the key has a passphrase, and none was given")
            return cls(Ed25519PrivateKey.from_private_bytes(open_key(data, passphrase(), cost=cost)))
        except IdentityError as error:
            raise IdentityError(f"{path}: {error.message}", hint=error.hint) from error

    def save(self, directory: Path, passphrase: str | None = None, *, cost: ScryptCost = COST) -> None:
        """Write ``operator.key``, 0600 in a 0700 directory. Raises `IdentityError` if one exists."""
        make_private_directory(directory)
        write_private(directory / OPERATOR_KEY, self._at_rest(passphrase, cost))

    def replace(self, directory: Path, passphrase: str | None, *, cost: ScryptCost = COST) -> None:
        """Write the file anew with another passphrase, or with none. Raises `IdentityError`."""
        check_private_directory(directory)
        replace_private(directory / OPERATOR_KEY, self._at_rest(passphrase, cost))

    def _at_rest(self, passphrase: str | None, cost: ScryptCost) -> bytes:
        if passphrase is None:
            return _private_pem(self._key)
        salt, nonce = os.urandom(SALT_BYTES), os.urandom(NONCE_BYTES)
        return seal_key(self._key.private_bytes_raw(), passphrase, salt=salt, nonce=nonce, cost=cost)

    def sign(self, data: bytes) -> bytes:
        return self._key.sign(data)


def verify(public_key: bytes, signature: bytes, data: bytes) -> None:
    """Check an Ed25519 signature. Raises `HandshakeError` if it, or the key, is wrong in any way."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, ValueError):
        raise HandshakeError("a signature does not verify under the key it should be of") from None


def has_passphrase(directory: Path) -> bool:
    """Return whether the operator key in ``directory`` is encrypted. Raises `IdentityError`."""
    return is_envelope(read_private(directory / OPERATOR_KEY))


def _load_key(path: Path) -> Ed25519PrivateKey:
    return _key_from_pem(read_private(path), path)


def _key_from_pem(data: bytes, path: Path) -> Ed25519PrivateKey:
    try:
        key = load_pem_private_key(data, password=None)
    except (ValueError, TypeError):
        raise IdentityError(f"{path} is not an unencrypted private key in PEM", hint=_RESTORE) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise IdentityError(
            f"{path} holds a key of type {type(key).__name__}, expected Ed25519", hint=_RESTORE
        )
    return key


def _private_pem(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _public_bytes(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
