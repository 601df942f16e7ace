"""The envelope of a private key under a passphrase: bytes in, bytes out.

Normative text: docs/protocol.md, "The operator's key at rest". A header names every parameter, and is the
AAD of the sealed key. The parameters in a file are compared with the version's own before scrypt runs, so
a file cannot make it spend other memory or time.
"""

from __future__ import annotations

import struct
import unicodedata
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from convoy.crypto.cipher import KEY_BYTES, NONCE_BYTES, TAG_BYTES
from convoy.errors import IdentityError

MAGIC = b"CNVYOKEY"
VERSION = 1
SALT_BYTES = 16
PRIVATE_KEY_BYTES = 32
MAX_PASSPHRASE_BYTES = 1024

_HEADER = struct.Struct(f">8sBBBB{SALT_BYTES}s{NONCE_BYTES}s")
ENVELOPE_BYTES = _HEADER.size + PRIVATE_KEY_BYTES + TAG_BYTES


@dataclass(frozen=True, slots=True)
class ScryptCost:
    """Set the parameters of scrypt (RFC 7914): N = 2^``log2_n``. It takes 128 * N * ``r`` bytes of memory."""

    log2_n: int
    r: int
    p: int

    def __str__(self) -> str:
        return f"N=2^{self.log2_n}, r={self.r}, p={self.p}"


COST = ScryptCost(17, 8, 1)


def seal_key(
    private_key: bytes, passphrase: str, *, salt: bytes, nonce: bytes, cost: ScryptCost = COST
) -> bytes:
    """Return the envelope of an Ed25519 private key. ``salt`` and ``nonce`` must be random and new each
    time.

    Raises `IdentityError` for a passphrase that is empty or too long.
    """
    header = _HEADER.pack(MAGIC, VERSION, cost.log2_n, cost.r, cost.p, salt, nonce)
    return header + AESGCM(_derive(passphrase, salt, cost)).encrypt(nonce, private_key, header)


def is_envelope(data: bytes) -> bool:
    """Return whether ``data`` begins as an envelope does."""
    return data.startswith(MAGIC)


def open_key(envelope: bytes, passphrase: str, *, cost: ScryptCost = COST) -> bytes:
    """Return the private key. Raises `IdentityError` for a wrong passphrase or an invalid envelope."""
    header, sealed = check_envelope(envelope, cost)
    *_, salt, nonce = _HEADER.unpack(header)
    try:
        return AESGCM(_derive(passphrase, salt, cost)).decrypt(nonce, sealed, header)
    except InvalidTag:
        raise IdentityError(
            "the passphrase is wrong, or the file was changed",
            hint="try again; a forgotten passphrase cannot be recovered",
        ) from None


def check_envelope(envelope: bytes, cost: ScryptCost = COST) -> tuple[bytes, bytes]:
    """Return header and sealed key. Raises `IdentityError` for another length, version or cost than ours."""
    if not is_envelope(envelope) or len(envelope) != ENVELOPE_BYTES:
        raise IdentityError(
            f"an encrypted key has {len(envelope)} bytes, expected {ENVELOPE_BYTES}",
            hint="restore the file from a backup: it was cut or changed",
        )
    header = envelope[: _HEADER.size]
    _, version, log2_n, r, p, _, _ = _HEADER.unpack(header)
    if version != VERSION:
        raise IdentityError(
            f"an encrypted key has version {version}, expected {VERSION}",
            hint="open it with the version of convoy that made it",
        )
    # Compared before scrypt runs, because a changed file could demand any memory and time.
    named = ScryptCost(log2_n, r, p)
    if named != cost:
        raise IdentityError(
            f"an encrypted key names scrypt with {named}, expected {cost}",
            hint="the file was changed, or another program made it",
        )
    return header, envelope[_HEADER.size :]


def _derive(passphrase: str, salt: bytes, cost: ScryptCost) -> bytes:
    scrypt = Scrypt(salt=salt, length=KEY_BYTES, n=1 << cost.log2_n, r=cost.r, p=cost.p)
    try:
        return scrypt.derive(_encode(passphrase))
    except MemoryError:
        mib = (128 * cost.r << cost.log2_n) >> 20
        raise IdentityError(
            f"there is no memory for the passphrase's key, which takes {mib} MiB",
            hint="end other programs on this machine, and try again",
        ) from None


def _encode(passphrase: str) -> bytes:
    try:
        # NFC gives one passphrase one encoding, whatever keyboard it was typed on.
        data = unicodedata.normalize("NFC", passphrase).encode("utf-8")
    except UnicodeEncodeError:
        raise IdentityError("the passphrase is not text in UTF-8") from None
    if not 1 <= len(data) <= MAX_PASSPHRASE_BYTES:
        raise IdentityError(f"the passphrase has {len(data)} bytes, expected 1 to {MAX_PASSPHRASE_BYTES}")
    return data
