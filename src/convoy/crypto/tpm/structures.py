"""Strict parsers for a TPM 2.0's public areas, quotes, signatures and names (TPM 2.0 Library, Parts 1,
2).

All input here comes from another machine. Each length is checked against the remaining bytes and against
a limit, every constant other than the expected one is refused, and no bytes may be left over. All
integers are big-endian. Errors are `AttestationError`; its text is the reason in a verdict.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key

from convoy.errors import AttestationError

MAX_PUBLIC_BYTES = 1024
MAX_QUOTE_BYTES = 1024
MAX_SIGNATURE_BYTES = 1024
NUM_PCRS = 24
PCR_BYTES = 32

PublicKey = rsa.RSAPublicKey | ec.EllipticCurvePublicKey

# TPM_GENERATED_VALUE: a restricted key signs no outside data that begins with it.
_GENERATED = 0xFF544347
_ATTEST_QUOTE = 0x8018
_ALG_RSA, _ALG_SHA256, _ALG_NULL, _ALG_ECC = 0x0001, 0x000B, 0x0010, 0x0023
_ALG_AES, _ALG_CFB = 0x0006, 0x0043
_ALG_RSASSA, _ALG_ECDSA = 0x0014, 0x0018
_CURVE_P256 = 0x0003
_RH_ENDORSEMENT = 0x4000000B
_EXPONENT = 65537

_FIXED_TPM, _FIXED_PARENT, _ORIGIN = 1 << 1, 1 << 4, 1 << 5
_DUPLICATION, _RESTRICTED, _DECRYPT, _SIGN = 1 << 11, 1 << 16, 1 << 17, 1 << 18
_NAMES = {
    _FIXED_TPM: "fixedTPM",
    _FIXED_PARENT: "fixedParent",
    _ORIGIN: "sensitiveDataOrigin",
    _DUPLICATION: "encryptedDuplication",
    _RESTRICTED: "restricted",
    _DECRYPT: "decrypt",
    _SIGN: "sign",
}
_BOUND = (_FIXED_TPM, _FIXED_PARENT, _ORIGIN, _RESTRICTED)


@dataclass(frozen=True, slots=True)
class PublicArea:
    """Hold a TPMT_PUBLIC. ``name`` is the TPM's name of the key: hash algorithm, and the hash of all of
    this.
    """

    attributes: int
    key: PublicKey = field(repr=False)
    # _ALG_RSASSA, _ALG_ECDSA, or _ALG_NULL for a key that decrypts.
    scheme: int
    # Algorithm, bits, mode; (_ALG_NULL, 0, 0) for none.
    symmetric: tuple[int, int, int]
    name: bytes

    @property
    def key_der(self) -> bytes:
        """Return the DER SubjectPublicKeyInfo: the form in which the roster lists an attestation key."""
        return self.key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)

    @property
    def endorsement_name(self) -> bytes:
        """Return the qualified name of this key as a primary key of the endorsement hierarchy."""
        parent = _RH_ENDORSEMENT.to_bytes(4, "big")
        return _ALG_SHA256.to_bytes(2, "big") + hashlib.sha256(parent + self.name).digest()


@dataclass(frozen=True, slots=True)
class Quote:
    """Hold a TPMS_ATTEST of a quote. ``clock_ms`` and the counts say how long and how often the machine
    ran.
    """

    # The qualified name of the key.
    signer: bytes
    extra: bytes
    clock_ms: int
    reset_count: int
    restart_count: int
    firmware: int
    # The quoted registers of the SHA-256 bank.
    pcrs: tuple[int, ...]
    pcr_digest: bytes


def parse_public(data: bytes) -> PublicArea:
    """Return a TPM2B_PUBLIC of an RSA or P-256 key named with SHA-256. Raises `AttestationError`."""
    what = "the key's public area"
    if len(data) > MAX_PUBLIC_BYTES:
        raise AttestationError(f"{what} has {len(data)} bytes, and the limit is {MAX_PUBLIC_BYTES}")
    outer = _Reader(data, what)
    area = outer.sized(MAX_PUBLIC_BYTES)
    outer.end()
    reader = _Reader(area, what)
    kind = reader.one_of(2, (_ALG_RSA, _ALG_ECC), "type")
    reader.one_of(2, (_ALG_SHA256,), "name algorithm")
    attributes = reader.number(4)
    # The authorisation policy, which controls the key's use on that machine. It does not matter here.
    reader.sized(64)
    symmetric = _symmetric(reader)
    scheme = _scheme(reader)
    key = _rsa(reader) if kind == _ALG_RSA else _ecc(reader)
    reader.end()
    name = _ALG_SHA256.to_bytes(2, "big") + hashlib.sha256(area).digest()
    return PublicArea(attributes, key, scheme, symmetric, name)


def parse_quote(data: bytes) -> Quote:
    """Return a TPMS_ATTEST as the TPM signed it.

    Raises `AttestationError` unless it is a quote, and only that.
    """
    if len(data) > MAX_QUOTE_BYTES:
        raise AttestationError(f"the quote has {len(data)} bytes, and the limit is {MAX_QUOTE_BYTES}")
    reader = _Reader(data, "the quote")
    if reader.number(4) != _GENERATED:
        raise AttestationError("the quote was not made by a TPM: its magic is another")
    reader.one_of(2, (_ATTEST_QUOTE,), "type")
    signer = reader.sized(68)
    extra = reader.sized(66)
    clock_ms, reset_count, restart_count = reader.number(8), reader.number(4), reader.number(4)
    reader.one_of(1, (0, 1), "clock's safe flag")
    firmware = reader.number(8)
    pcrs = _selection(reader)
    pcr_digest = reader.sized(64)
    reader.end()
    return Quote(signer, extra, clock_ms, reset_count, restart_count, firmware, pcrs, pcr_digest)


def check_attestation_key(public: PublicArea) -> None:
    """Raise `AttestationError` unless this key never left its TPM and signs only that TPM's statements."""
    _check_attributes(public, (*_BOUND, _SIGN), (_DECRYPT, _DUPLICATION), "attestation key")
    if public.scheme not in {_ALG_RSASSA, _ALG_ECDSA} or public.symmetric[0] != _ALG_NULL:
        raise AttestationError("the attestation key has no signature scheme, expected RSASSA or ECDSA")


def check_endorsement_key(public: PublicArea) -> None:
    """Raise `AttestationError` unless this is an RSA storage key with AES-128-CFB, as the default EK is."""
    _check_attributes(public, (*_BOUND, _DECRYPT), (_SIGN, _DUPLICATION), "endorsement key")
    if public.symmetric != (_ALG_AES, 128, _ALG_CFB) or not isinstance(public.key, rsa.RSAPublicKey):
        raise AttestationError("the endorsement key is not an RSA key with AES-128-CFB")


def check_signature(public: PublicArea, signature: bytes, signed: bytes) -> None:
    """Check a TPMT_SIGNATURE with SHA-256. Raises `AttestationError`."""
    if len(signature) > MAX_SIGNATURE_BYTES:
        raise AttestationError(
            f"the quote's signature has {len(signature)} bytes, and the limit is {MAX_SIGNATURE_BYTES}"
        )
    reader = _Reader(signature, "the quote's signature")
    reader.one_of(2, (public.scheme,), "scheme")
    reader.one_of(2, (_ALG_SHA256,), "hash")
    first = reader.sized(512)
    second = reader.sized(512) if public.scheme == _ALG_ECDSA else b""
    reader.end()
    try:
        if isinstance(public.key, rsa.RSAPublicKey):
            public.key.verify(first, signed, padding.PKCS1v15(), hashes.SHA256())
        else:
            pair = encode_dss_signature(int.from_bytes(first, "big"), int.from_bytes(second, "big"))
            public.key.verify(pair, signed, ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError):
        raise AttestationError("the quote's signature does not verify under the attestation key") from None


def pcr_digest(values: Sequence[bytes]) -> bytes:
    """Return the digest that a SHA-256 quote has for these register values, in the order of their indices."""
    return hashlib.sha256(b"".join(values)).digest()


def key_algorithm(key_der: bytes) -> str:
    """Return ``rsa`` or ``ecc`` for an attestation key in the roster's form.

    Raises `AttestationError` for others.
    """
    try:
        key = load_der_public_key(key_der)
    except ValueError:
        raise AttestationError("the attestation key is not a SubjectPublicKeyInfo in DER") from None
    if isinstance(key, rsa.RSAPublicKey):
        return "rsa"
    if isinstance(key, ec.EllipticCurvePublicKey):
        return "ecc"
    raise AttestationError("the attestation key is neither RSA nor of an elliptic curve")


def _check_attributes(public: PublicArea, wanted: Sequence[int], refused: Sequence[int], what: str) -> None:
    for bit in wanted:
        if not public.attributes & bit:
            raise AttestationError(f"the {what} is not {_NAMES[bit]}")
    for bit in refused:
        if public.attributes & bit:
            raise AttestationError(f"the {what} is {_NAMES[bit]}, and must not be")


def _symmetric(reader: _Reader) -> tuple[int, int, int]:
    if reader.one_of(2, (_ALG_NULL, _ALG_AES), "symmetric algorithm") == _ALG_NULL:
        return _ALG_NULL, 0, 0
    return _ALG_AES, reader.number(2), reader.one_of(2, (_ALG_CFB,), "symmetric mode")


def _scheme(reader: _Reader) -> int:
    scheme = reader.one_of(2, (_ALG_NULL, _ALG_RSASSA, _ALG_ECDSA), "scheme")
    if scheme != _ALG_NULL:
        reader.one_of(2, (_ALG_SHA256,), "scheme's hash")
    return scheme


def _rsa(reader: _Reader) -> rsa.RSAPublicKey:
    bits = reader.one_of(2, (2048, 3072, 4096), "key size")
    # 0 stands for the default, which is 65537.
    reader.one_of(4, (0, _EXPONENT), "exponent")
    modulus = reader.sized(512)
    if len(modulus) * 8 != bits or not modulus[0] & 0x80:
        raise AttestationError(f"the RSA key has {len(modulus)} bytes, expected {bits // 8}")
    try:
        return rsa.RSAPublicNumbers(_EXPONENT, int.from_bytes(modulus, "big")).public_key()
    except ValueError:
        raise AttestationError("the RSA key is none") from None


def _ecc(reader: _Reader) -> ec.EllipticCurvePublicKey:
    reader.one_of(2, (_CURVE_P256,), "curve")
    reader.one_of(2, (_ALG_NULL,), "key derivation")
    x, y = (int.from_bytes(reader.sized(32), "big") for _ in range(2))
    try:
        return ec.EllipticCurvePublicNumbers(x, y, ec.SECP256R1()).public_key()
    except ValueError:
        raise AttestationError("the key is no point of its curve") from None


def _selection(reader: _Reader) -> tuple[int, ...]:
    if reader.number(4) != 1:
        raise AttestationError("the quote is over other banks than SHA-256 alone")
    reader.one_of(2, (_ALG_SHA256,), "bank")
    size = reader.one_of(1, (3, 4), "selection's size")
    bits = int.from_bytes(reader.take(size), "little")
    if bits >> NUM_PCRS:
        raise AttestationError(f"the quote is over a register from {NUM_PCRS} on")
    return tuple(index for index in range(NUM_PCRS) if bits >> index & 1)


class _Reader:
    """Read bytes from the front. Missing or remaining bytes are an error that names the structure
    ``what``.
    """

    def __init__(self, data: bytes, what: str) -> None:
        self._data = data
        self._at = 0
        self._what = what

    def take(self, size: int) -> bytes:
        left = len(self._data) - self._at
        if size > left:
            raise AttestationError(f"{self._what} ends too early: {left} bytes are left, expected {size}")
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def one_of(self, size: int, allowed: Sequence[int], field_name: str) -> int:
        value = self.number(size)
        if value not in allowed:
            raise AttestationError(f"{self._what} has {field_name} 0x{value:x}, which is not accepted")
        return value

    def sized(self, limit: int) -> bytes:
        size = self.number(2)
        if size > limit:
            raise AttestationError(f"{self._what} has a field of {size} bytes, and the limit is {limit}")
        return self.take(size)

    def end(self) -> None:
        if self._at != len(self._data):
            raise AttestationError(f"{self._what} is followed by {len(self._data) - self._at} other bytes")
