"""The self-signed TLS certificate of a member: a pinned key in the form that TLS stacks accept.

Its fields are not trusted: both ends compare the exact bytes with the signed roster. Subjects differ from
key to key, and both key identifiers are present, because OpenSSL looks up anchors by subject and then by
key identifier.
"""

from __future__ import annotations

import datetime
import hashlib

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID

from convoy.errors import IdentityError

_PEM = "a certificate in PEM begins with -----BEGIN CERTIFICATE-----"

# The roster says how long a member is trusted; RFC 5280 4.1.2.5 names this date for "no well-defined
# expiration".
_NOT_BEFORE = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
_SIGNATURE_BYTES = 64

# `InvalidVersion` is not a subclass of the others, so it is listed.
_UNREADABLE = (ValueError, x509.InvalidVersion, UnsupportedAlgorithm)


def make_certificate(key: Ed25519PrivateKey) -> bytes:
    """Return a self-signed certificate (DER) for a TLS key."""
    return _build(key.public_key(), x509.random_serial_number(), key)


def _build(public: Ed25519PublicKey, serial: int, signer: Ed25519PrivateKey) -> bytes:
    label = hashlib.sha256(public.public_bytes(Encoding.Raw, PublicFormat.Raw)).hexdigest()[:32]
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"convoy {label}")])
    identifier = x509.SubjectKeyIdentifier.from_public_key(public)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(public)
        .serial_number(serial)
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False
        )
        .add_extension(_key_usage(), critical=True)
    )
    return builder.sign(signer, None).public_bytes(Encoding.DER)


def certificate_key(certificate_der: bytes) -> bytes:
    """Return the Ed25519 public key (32 bytes) in a certificate that `make_certificate` could have made.

    Raises `IdentityError` for any other certificate: a foreign subject or key identifier could take the
    place of another member's among OpenSSL's anchors.
    """
    try:
        certificate = x509.load_der_x509_certificate(certificate_der)
        key = certificate.public_key()
        exact = certificate.public_bytes(Encoding.DER) == certificate_der
    except _UNREADABLE as error:
        raise IdentityError(f"not a certificate in DER: {error}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise IdentityError(f"the certificate has a key of type {type(key).__name__}, expected Ed25519")
    if not exact:
        raise IdentityError("the certificate is followed by other bytes")
    _require_ours(certificate, key, certificate_der)
    return key.public_bytes(Encoding.Raw, PublicFormat.Raw)


def _require_ours(certificate: x509.Certificate, key: Ed25519PublicKey, certificate_der: bytes) -> None:
    # The certificate is made again for the same key and serial number, signed by a key that is thrown away.
    # All bytes but the signature at the end must be the same, so no field has to be judged by itself.
    try:
        expected = _build(key, certificate.serial_number, Ed25519PrivateKey.generate())
        tbs = certificate.tbs_certificate_bytes
    except _UNREADABLE as error:
        raise IdentityError(f"the certificate has a field that convoy never writes: {error}") from None
    if certificate_der[:-_SIGNATURE_BYTES] != expected[:-_SIGNATURE_BYTES]:
        raise IdentityError(
            "the certificate has another subject, issuer, key identifier or extension than convoy derives "
            "from its key",
            hint="is this the directory of the keys? `convoy identity new NAME` makes new ones",
        )
    try:
        key.verify(certificate_der[-_SIGNATURE_BYTES:], tbs)
    except InvalidSignature:
        raise IdentityError("the certificate is not signed by its own key") from None


def certificate_fingerprint(certificate_der: bytes) -> bytes:
    """Return the SHA-256 over the exact DER bytes, which the inner handshake binds."""
    return hashlib.sha256(certificate_der).digest()


def to_pem(certificate_der: bytes) -> bytes:
    """Return the same certificate as PEM, which `ssl` loads."""
    return x509.load_der_x509_certificate(certificate_der).public_bytes(Encoding.PEM)


def from_pem(pem: bytes) -> bytes:
    """Return the DER of the one certificate in ``pem``. Raises `IdentityError`."""
    try:
        return x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)
    except _UNREADABLE as error:
        raise IdentityError(f"not a certificate in PEM: {error}", hint=_PEM) from None


def certificate_names(pem: bytes) -> tuple[str, ...]:
    """Return the DNS names and addresses that the first certificate in ``pem`` is for.

    Raises `IdentityError`.
    """
    try:
        found = x509.load_pem_x509_certificate(pem).extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        )
    except x509.ExtensionNotFound:
        return ()
    except _UNREADABLE as error:
        raise IdentityError(f"not a certificate in PEM: {error}", hint=_PEM) from None
    addresses = map(str, found.value.get_values_for_type(x509.IPAddress))
    return (*found.value.get_values_for_type(x509.DNSName), *addresses)


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
