"""A certificate and its key in files, as a server off loopback has them."""

from __future__ import annotations

import datetime
import ipaddress
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


def trust_few(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let HTTP clients of this process, and of those that it starts, trust one certificate instead of all.

    A client reads them when it is made, which takes 25 ms of processor time. Tests make thousands of clients,
    for servers on loopback. A client takes the variable before the file of certifi.
    """
    file, _ = make_tls_files(folder)
    patch.setenv("SSL_CERT_FILE", file)
    patch.delenv("SSL_CERT_DIR", raising=False)
    if "httpx" in sys.modules:
        import certifi

        patch.setattr(certifi, "where", lambda: file)


def make_tls_files(folder: Path, *names: str) -> tuple[str, str]:
    """Write a self-signed certificate for 127.0.0.1 and ``names``; return the paths of it and of its key."""
    folder.mkdir(exist_ok=True)
    key = Ed25519PrivateKey.generate()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "head")])
    alternatives = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), *map(x509.DNSName, names)]
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .sign(key, None)
    )
    files = folder / "tls.crt", folder / "tls.key"
    files[0].write_bytes(certificate.public_bytes(Encoding.PEM))
    files[1].touch(mode=0o600)
    files[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return str(files[0]), str(files[1])
