"""Recorded statements of TPMs (tests/vectors/tpm_v1.json), and a TPM that lies: structures made in Python."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

IDENTITY = Ed25519PrivateKey.from_private_bytes(b"\x01" * 32)
IDENTITY_KEY = IDENTITY.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
ATTESTATION_ATTRIBUTES = (
    # sign, restricted, userWithAuth, sensitiveDataOrigin, fixedParent, fixedTPM
    0x00050072
)

_FILE = Path(__file__).resolve().parent.parent / "vectors" / "tpm_v1.json"


@functools.cache
def vectors() -> dict[str, Any]:
    """Return the recorded values, as text."""
    loaded: dict[str, Any] = json.loads(_FILE.read_text())
    return loaded


def recorded(name: str) -> bytes:
    return base64.b64decode(vectors()[name])


def recorded_parts(name: str) -> list[bytes]:
    """Return public area, quote, signature and register values."""
    return [base64.b64decode(part) for part in vectors()[name]]


def sized(data: bytes) -> bytes:
    return len(data).to_bytes(2, "big") + data


class LyingTpm:
    """Sign any statement with a P-256 key in Python, so that each field of one can be wrong by itself."""

    def __init__(self, attributes: int = ATTESTATION_ATTRIBUTES) -> None:
        self.key = ec.derive_private_key(7, ec.SECP256R1())
        numbers = self.key.public_key().public_numbers()
        area = (
            bytes.fromhex("0023000b")
            + attributes.to_bytes(4, "big")
            + bytes.fromhex("000000100018000b00030010")
        )
        area += sized(numbers.x.to_bytes(32, "big")) + sized(numbers.y.to_bytes(32, "big"))
        self.public_area = sized(area)
        self.key_der = self.key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        name = bytes.fromhex("000b") + hashlib.sha256(area).digest()
        self.qualified_name = (
            bytes.fromhex("000b") + hashlib.sha256(bytes.fromhex("4000000b") + name).digest()
        )

    def quote(
        self,
        extra: bytes,
        values: list[bytes],
        *,
        magic: int = 0xFF544347,
        kind: int = 0x8018,
        signer: bytes | None = None,
        selection: bytes = bytes.fromhex("00000001000b03810001"),
        tail: bytes = b"",
    ) -> list[bytes]:
        """Return the parts of evidence, over registers 0, 7 and 16 unless ``selection`` names others."""
        said = magic.to_bytes(4, "big") + kind.to_bytes(2, "big")
        said += sized(self.qualified_name if signer is None else signer) + sized(extra)
        said += bytes(8 + 4 + 4) + b"\1" + bytes(8) + selection
        said += sized(hashlib.sha256(b"".join(values)).digest()) + tail
        return [self.public_area, said, self.sign(said), *values]

    def sign(self, said: bytes) -> bytes:
        r, s = decode_dss_signature(self.key.sign(said, ec.ECDSA(hashes.SHA256())))
        return bytes.fromhex("0018000b") + sized(r.to_bytes(32, "big")) + sized(s.to_bytes(32, "big"))
