"""The self-signed TLS certificate of a member: a pinned key in the form that TLS stacks accept.

Nothing in it is believed: both ends compare the exact bytes with the signed roster. Subjects differ from key
to key, and both key identifiers are present, because OpenSSL looks up anchors by subject and then by key
identifier.
"""

from __future__ import annotations

import datetime
import hashlib

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID

from convoy.errors import IdentityError

# The roster says how long a member is trusted; RFC 5280 4.1.2.5 names this date for "no well-defined
# expiration".
_NOT_BEFORE = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)


def make_certificate(key: Ed25519PrivateKey) -> bytes:
    """A self-signed certificate (DER) for a TLS key."""
    public = key.public_key()
    label = hashlib.sha256(public.public_bytes(Encoding.Raw, PublicFormat.Raw)).hexdigest()[:32]
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"convoy {label}")])
    identifier = x509.SubjectKeyIdentifier.from_public_key(public)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False
        )
        .add_extension(_key_usage(), critical=True)
    )
    return builder.sign(key, None).public_bytes(Encoding.DER)


def certificate_key(certificate_der: bytes) -> bytes:
    """The Ed25519 public key (32 bytes) in a certificate. Raises `IdentityError` for anything else."""
    try:
        certificate = x509.load_der_x509_certificate(certificate_der)
        key = certificate.public_key()
        exact = certificate.public_bytes(Encoding.DER) == certificate_der
    except ValueError as error:
        raise IdentityError(f"not a certificate in DER: {error}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise IdentityError(f"the certificate has a key of type {type(key).__name__}, expected Ed25519")
    if not exact:
        raise IdentityError("the certificate is followed by other bytes")
    return key.public_bytes(Encoding.Raw, PublicFormat.Raw)


def certificate_fingerprint(certificate_der: bytes) -> bytes:
    """SHA-256 over the exact DER bytes: what the inner handshake binds."""
    return hashlib.sha256(certificate_der).digest()


def to_pem(certificate_der: bytes) -> bytes:
    """The same certificate as PEM, which `ssl` loads."""
    return x509.load_der_x509_certificate(certificate_der).public_bytes(Encoding.PEM)


def from_pem(pem: bytes) -> bytes:
    """DER of the one certificate in ``pem``. Raises `IdentityError`."""
    try:
        return x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)
    except ValueError as error:
        raise IdentityError(f"not a certificate in PEM: {error}") from None


def _key_usage() -> x509.KeyUsage:
    # Strict verification wants keyCertSign of an issuer, and a self-signed certificate is its own issuer.
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
