"""Endorsement certificates: a TPM's manufacturer states that this endorsement key is in one of its TPMs."""

from __future__ import annotations

import datetime
from collections.abc import Iterable

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ObjectIdentifier
from cryptography.x509.verification import (
    Criticality,
    ExtensionPolicy,
    PolicyBuilder,
    Store,
    VerificationError,
)

from convoy.errors import AttestationError, ConfigError

MAX_CERTIFICATE_BYTES = 8 * 1024
MAX_AUTHORITIES = 64

# TCG EK Credential Profile 3.2.16: tcg-kp-EKCertificate.
_EK_USAGE = ObjectIdentifier("2.23.133.8.1")
_UNREADABLE = (ValueError, x509.InvalidVersion, UnsupportedAlgorithm)


def read_authorities(pem: bytes, what: str) -> list[bytes]:
    """Return the DER of every certificate in a PEM file. Raises `ConfigError` naming ``what``."""
    try:
        certificates = x509.load_pem_x509_certificates(pem)
    except _UNREADABLE:
        raise ConfigError(
            f"{what} holds no certificates in PEM",
            hint="convert each certificate with `openssl x509 -inform der`, and put them into one file",
        ) from None
    if len(certificates) > MAX_AUTHORITIES:
        raise ConfigError(
            f"{what} holds {len(certificates)} certificates, and the limit is {MAX_AUTHORITIES}"
        )
    return [certificate.public_bytes(Encoding.DER) for certificate in certificates]


def certificate_prefix(data: bytes) -> bytes:
    """Return the certificate at the front of a TPM's memory, which some makers pad.

    Data that does not begin like a certificate is returned unchanged.
    """
    if len(data) > 4 and data[:2] == b"\x30\x82":
        return data[: 4 + int.from_bytes(data[2:4], "big")]
    return data


def check_endorsement(
    certificate_der: bytes,
    endorsement_key: object,
    authorities: Iterable[bytes],
    now: datetime.datetime | None = None,
) -> str:
    """Check that an EK certificate is for this key, and that its chain ends at one of ``authorities``
    (DER).

    Every authority is an anchor, also an intermediate one. Return the anchor's subject. Raises
    `AttestationError`.
    """
    if len(certificate_der) > MAX_CERTIFICATE_BYTES:
        raise AttestationError(
            f"the endorsement certificate has {len(certificate_der)} bytes, "
            f"and the limit is {MAX_CERTIFICATE_BYTES}"
        )
    anchors = [x509.load_der_x509_certificate(der) for der in authorities]
    if not anchors:
        raise AttestationError(
            "no authority is trusted to certify endorsement keys",
            hint="name the TPM maker's certificates under [attestation.tpm] authorities in the policy",
        )
    try:
        certificate = x509.load_der_x509_certificate(certificate_der)
        key = certificate.public_key()
        chain = _chain(certificate, anchors, now or datetime.datetime.now(datetime.UTC))
        _check_usage(certificate)
    except _UNREADABLE:
        raise AttestationError("the endorsement certificate cannot be read") from None
    if not isinstance(key, rsa.RSAPublicKey) or key != endorsement_key:
        raise AttestationError("the endorsement certificate is for another key")
    return chain[-1].subject.rfc4514_string()


def _chain(
    certificate: x509.Certificate, anchors: list[x509.Certificate], now: datetime.datetime
) -> list[x509.Certificate]:
    # The names in an EK certificate tell people the TPM model; only the key counts here. So the web's rules
    # for the leaf (names, usages) do not apply, and those for authorities do.
    leaf = (
        ExtensionPolicy.permit_all()
        .require_present(x509.SubjectAlternativeName, Criticality.AGNOSTIC, None)
        .require_present(x509.BasicConstraints, Criticality.AGNOSTIC, None)
    )
    builder = PolicyBuilder().time(now).store(Store(anchors))
    builder = builder.extension_policies(ee_policy=leaf, ca_policy=ExtensionPolicy.webpki_defaults_ca())
    try:
        return list(builder.build_client_verifier().verify(certificate, []).chain)
    except VerificationError:
        raise AttestationError(
            f"the endorsement certificate, issued by {certificate.issuer.rfc4514_string()[:200]!r}, "
            "does not lead to an authority of the policy"
        ) from None


def _check_usage(certificate: x509.Certificate) -> None:
    try:
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        basic = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    except x509.ExtensionNotFound:
        raise AttestationError("the endorsement certificate does not say that it is one") from None
    if basic.ca or _EK_USAGE not in usage:
        raise AttestationError("the certificate is not one of an endorsement key")
