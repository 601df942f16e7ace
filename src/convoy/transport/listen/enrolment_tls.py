"""TLS for enrolment: the listener shows a one-time certificate; the newcomer pins it and shows none.

A dialling machine is a stranger until its proof holds, so everything here works under total deadlines and
small limits.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import socket
import ssl
import tempfile
import time
from pathlib import Path

from convoy.crypto.certificate import certificate_fingerprint
from convoy.crypto.enrolment import OneTimeCertificate
from convoy.errors import ConfigError, FrameError, HandshakeError, LinkBroken, PeerUnreachable
from convoy.transport.dial import address_error
from convoy.transport.streams.stream import Stream, recv_exactly
from convoy.transport.streams.tcp import TlsStream, peer_certificate, restrict_tls, start_tls_client
from convoy.wire.messages.enrolment import (
    PREAMBLE_BYTES,
    EnrolmentType,
    decode_enrolment_preamble,
    encode_enrolment,
)

STALL_TIMEOUT_S = 10.0
_BACKLOG = 128


def one_time_context(certificate: OneTimeCertificate) -> ssl.SSLContext:
    """Return the listener's context. The key is on disk, in a private folder, only while `ssl` reads it."""
    context = restrict_tls(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    context.num_tickets = 0
    # mkdtemp gives the folder mode 0700, so no other user reads the key.
    with tempfile.TemporaryDirectory(prefix="convoy-") as folder:
        file = Path(folder) / "one-time.pem"
        file.touch(mode=0o600)
        file.write_bytes(certificate.certificate_pem + certificate.key_pem)
        context.load_cert_chain(file)
    return context


def listen_everywhere(host: str | None, port: int, *, serving_flag: str = "") -> socket.socket:
    """Return a listening socket on ``host``, or on every address of this machine.

    ``serving_flag`` is the flag of ``convoy serve`` for this port, if it has one. Raises `ConfigError` with
    the flags that choose another port.
    """
    try:
        if host is not None:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((host, port), family=family, backlog=_BACKLOG)
        # IPv6 may be off on this machine.
        with contextlib.suppress(OSError):
            if socket.has_dualstack_ipv6():
                return socket.create_server(
                    ("::", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
                )
        return socket.create_server(("", port), backlog=_BACKLOG)
    except (OSError, UnicodeError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            also = f" (`convoy serve`: {serving_flag})" if serving_flag else ""
            raise ConfigError(
                f"port {port} on {host or 'any address'} is taken",
                hint=f"--port {port % 65535 + 1}{also}, or stop what listens there",
            ) from error
        raise ConfigError(
            f"cannot listen on {host or 'any address'} port {port}: {address_error(error)}",
            hint="the address is not of this machine, or this user may not listen on that port",
        ) from error


def dial_pinned(address: tuple[str, int], fingerprint: bytes, deadline_s: float) -> tuple[Stream, str]:
    """Return a stream to the listener with exactly this certificate, and the local address that leads to
    it.

    Raises `PeerUnreachable`, or `HandshakeError` for another certificate. Nothing of ours was sent by
    then.
    """
    context = restrict_tls(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    # No authority vouches for a one-time certificate. The fingerprint in the token does, and is compared
    # below. TLS 1.3 still proves that the listener holds its key.
    context.verify_mode = ssl.CERT_NONE
    try:
        sock = socket.create_connection(address, max(0.001, deadline_s - time.monotonic()))
    except (OSError, UnicodeError, OverflowError) as error:
        reason = "did not answer in time" if isinstance(error, TimeoutError) else address_error(error)
        raise PeerUnreachable(reason) from error
    local = sock.getsockname()[0]
    secured = start_tls_client(sock, context, deadline_s)
    seen = certificate_fingerprint(peer_certificate(secured))
    if not hmac.compare_digest(seen, fingerprint):
        secured.close()
        raise HandshakeError("it shows another certificate than the invitation names")
    stream = TlsStream(secured, STALL_TIMEOUT_S)
    stream.set_deadline(deadline_s)
    return stream, local


def send_enrolment(stream: Stream, kind: EnrolmentType, body: bytes) -> None:
    """Send one frame. Raises `LinkBroken`."""
    stream.send_all(encode_enrolment(kind, body))


def receive_enrolment(stream: Stream) -> tuple[EnrolmentType, bytes]:
    """Receive one frame, and check its length before reading its body. Raises `FrameError` or
    `LinkBroken`.
    """
    preamble = recv_exactly(stream, PREAMBLE_BYTES)
    if not preamble:
        raise LinkBroken("the other end hung up")
    kind, length = decode_enrolment_preamble(preamble)
    body = recv_exactly(stream, length)
    if len(body) != length:
        raise FrameError(f"a {kind.name} of {length} bytes broke off after {len(body)}")
    return kind, bytes(body)
