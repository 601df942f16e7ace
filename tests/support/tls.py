"""A certificate authority for tests, and a relay that ends TLS with a certificate of its own."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import socket
import ssl
import threading
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


class TestAuthority:
    """Sign certificates for loopback. ``trusting`` makes contexts that trust only this authority."""

    __test__ = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = generate_private_key(SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
        self._own = self._build(self._name, self._key, is_authority=True)
        self.file = folder / "authority.pem"
        self.file.write_bytes(self._own.public_bytes(Encoding.PEM))

    def issue(self, label: str) -> tuple[str, str]:
        """Return the files of a new certificate for 127.0.0.1 and localhost, and of its key."""
        key = generate_private_key(SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, label)])
        certificate = self._build(name, key, is_authority=False)
        files = self._folder / f"{label}.pem", self._folder / f"{label}.key"
        files[0].write_bytes(certificate.public_bytes(Encoding.PEM))
        files[1].touch(mode=0o600)
        files[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return str(files[0]), str(files[1])

    def trusting(self) -> ssl.SSLContext:
        """Return a client's context that trusts this authority."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.file)
        return context

    def _build(
        self, name: x509.Name, key: EllipticCurvePrivateKey, *, is_authority: bool
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=30))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        return builder.sign(self._key, SHA256())


class TlsRelay:
    """End TLS with ``certificate``, pass each byte on to ``target``, and keep all bytes that clients
    sent.

    ``dialling``: the context of the connections to the target; None dials in clear.
    """

    def __init__(
        self,
        certificate: tuple[str, str],
        target: tuple[str, int],
        dialling: ssl.SSLContext | None,
        port: int = 0,
    ) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(*certificate)
        self._target, self._dialling = target, dialling
        self._listener = socket.create_server(("127.0.0.1", port))
        self._sockets: list[socket.socket] = []
        self.port = int(self._listener.getsockname()[1])
        self.sent = bytearray()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for one in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
                near: socket.socket = self._context.wrap_socket(accepted, server_side=True)
                far = socket.create_connection(self._target, timeout=60)
                if self._dialling is not None:
                    far = self._dialling.wrap_socket(far, server_hostname="127.0.0.1")
            except OSError:
                if self._listener.fileno() < 0:
                    return
                continue
            self._sockets += [near, far]
            # One thread per relayed connection: two threads must not use one TLS socket at once.
            threading.Thread(target=self._pump, args=(near, far), daemon=True).start()

    def _pump(self, near: socket.socket, far: socket.socket) -> None:
        """Pass both ways in turns, until either end closes."""
        for one in (near, far):
            one.settimeout(0.02)
        with contextlib.suppress(OSError, ValueError):
            while True:
                for source, sink in ((near, far), (far, near)):
                    try:
                        data = source.recv(65536)
                    except TimeoutError:
                        continue
                    if not data:
                        return
                    if source is near:
                        self.sent += data
                    sink.sendall(data)
        for one in (near, far):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
