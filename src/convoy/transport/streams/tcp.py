"""The outer layer: TLS 1.3 over TCP, both ends with a certificate of the roster, nothing else trusted.

The context is our own, never `ssl.create_default_context`: that one honours SSLKEYLOGFILE and the system's
authorities.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import sys
import threading
import time

from convoy.errors import HandshakeError, IdentityError, LinkBroken, PeerBusy, PeerUnreachable, RosterError
from convoy.transport.member import LocalMember

_KEEPALIVE_IDLE_S = 10
_KEEPALIVE_INTERVAL_S = 5
_KEEPALIVE_PROBES = 3

# All of TLS 1.3's suites but the CCM ones: the short form of CCM has an 8-byte tag.
_CIPHERS = frozenset({"TLS_AES_256_GCM_SHA384", "TLS_AES_128_GCM_SHA256", "TLS_CHACHA20_POLY1305_SHA256"})
# From Darwin's netinet/tcp.h; Python 3.11 has no name for it there.
_DARWIN_TCP_KEEPALIVE = 0x10


def client_context(me: LocalMember) -> ssl.SSLContext:
    """Return the context for dialling.

    Raises `IdentityError` or `RosterError` for keys or anchors that do not load.
    """
    return _restrict(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), me)


def server_context(me: LocalMember) -> ssl.SSLContext:
    """Return the context for listening. Raises the errors of `client_context`.

    Without tickets there is no resumption: every connection proves both ends anew.
    """
    context = _restrict(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), me)
    context.num_tickets = 0
    return context


def restrict_tls(context: ssl.SSLContext) -> ssl.SSLContext:
    """Restrict ``context`` to TLS 1.3, without tickets and names, and return it."""
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION
    # The exact certificate is compared instead, and no name goes out as SNI.
    context.check_hostname = False
    return context


def _restrict(context: ssl.SSLContext, me: LocalMember) -> ssl.SSLContext:
    restrict_tls(context)
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags = ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_TRUSTED_FIRST
    certificate, key = me.identity.tls_files
    try:
        context.load_cert_chain(certificate, key)
    # ssl.SSLError is an OSError too.
    except OSError as error:
        raise IdentityError(
            f"{certificate} and {key} cannot be loaded: {_explain(error)}",
            hint="were they moved or changed after the start?",
        ) from error
    try:
        context.load_verify_locations(cadata=b"".join(member.certificate_der for member in me.roster.members))
    except (OSError, ValueError) as error:
        raise RosterError(f"the roster's certificates cannot be loaded: {_explain(error)}") from error
    return context


class TlsStream:
    """Carry bytes over a TLS connection that is already authenticated.

    At most one thread sends and one receives.
    """

    def __init__(self, sock: ssl.SSLSocket, stall_timeout_s: float) -> None:
        self._sock = sock
        self._stall_timeout_s = stall_timeout_s
        self._deadline_s: float | None = None
        self._timeout_s = sock.gettimeout()
        self._sending = threading.Lock()
        self._receiving = threading.Lock()

    def send_all(self, data: bytes | bytearray | memoryview) -> None:
        try:
            with self._sending:
                self._arm(self._stall_timeout_s)
                self._sock.sendall(data)
        except TimeoutError:
            raise LinkBroken("the other end took nothing before the deadline") from None
        except (OSError, ValueError) as error:
            reason = self._refusal() or error
            raise LinkBroken(_explain(reason)) from reason

    def recv_into(self, buffer: memoryview) -> int:
        try:
            with self._receiving:
                self._arm(None)
                return self._sock.recv_into(buffer)
        except TimeoutError:
            raise LinkBroken("nothing came before the deadline") from None
        except (OSError, ValueError) as error:
            raise LinkBroken(_explain(error)) from error

    def set_deadline(self, at_s: float | None) -> None:
        self._deadline_s = at_s

    def fileno(self) -> int:
        """Return the descriptor, or -1 once it is closed."""
        return self._sock.fileno()

    def pending(self) -> int:
        """Return the unread bytes of a TLS record that is decrypted already; 0 once the stream is closed."""
        try:
            return self._sock.pending()
        except (OSError, ValueError):
            return 0

    def close(self) -> None:
        # SSLSocket.shutdown would drop the TLS state first, and a later send would go out without TLS.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        # The shutdown woke the threads inside send and receive. Closing before they left would let the system
        # reuse the descriptor under them.
        with self._sending, self._receiving:
            self._sock.close()

    def _refusal(self) -> ssl.SSLError | None:
        """Return the alert of TLS that waits to be read after a send failed, or None.

        A listener judges the certificate after the dialler's TLS handshake has ended. Its alert arrives
        before its end of the connection, and only a read shows it.
        """
        if not self._receiving.acquire(blocking=False):
            return None
        try:
            self._timeout_s = 0.0
            self._sock.settimeout(0.0)
            self._sock.recv(1)
        except (OSError, ValueError) as error:
            if isinstance(error, ssl.SSLError) and is_tls_refusal(error):
                return error
        finally:
            self._receiving.release()
        return None

    def _arm(self, otherwise_s: float | None) -> None:
        if self._deadline_s is None:
            timeout_s = otherwise_s
        else:
            timeout_s = self._deadline_s - time.monotonic()
            if timeout_s <= 0:
                raise TimeoutError
        if timeout_s != self._timeout_s:
            self._sock.settimeout(timeout_s)
            self._timeout_s = timeout_s


def start_tls_client(sock: socket.socket, context: ssl.SSLContext, deadline_s: float) -> ssl.SSLSocket:
    """Run the TLS handshake of a dialler within the deadline.

    Raises `PeerUnreachable` if the other end says nothing or hangs up, as a full listener does, otherwise
    `HandshakeError`.
    """
    return _start_tls(sock, context, deadline_s, server_side=False)


def start_tls_server(sock: socket.socket, context: ssl.SSLContext, deadline_s: float) -> ssl.SSLSocket:
    """Run the TLS handshake of a listener within the deadline. Raises `HandshakeError` or
    `PeerUnreachable`.
    """
    return _start_tls(sock, context, deadline_s, server_side=True)


def _start_tls(
    sock: socket.socket, context: ssl.SSLContext, deadline_s: float, *, server_side: bool
) -> ssl.SSLSocket:
    try:
        tune_socket(sock)
        sock.settimeout(max(0.001, deadline_s - time.monotonic()))
        wrapped = context.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)
    except OSError as error:
        sock.close()
        raise _start_error(error, "TLS could not start", server_side) from error
    try:
        wrapped.do_handshake()
    except TimeoutError:
        wrapped.close()
        raise PeerUnreachable("it did not answer in time") from None
    except (OSError, ValueError) as error:
        wrapped.close()
        raise _start_error(error, "the TLS handshake failed", server_side) from error
    _require_cipher(wrapped)
    return wrapped


def _start_error(
    error: OSError | ValueError, what: str, server_side: bool
) -> HandshakeError | PeerUnreachable:
    # A listener with no room hangs up before it has read anything, so the dialler's caller should try again.
    if not server_side and isinstance(error, OSError) and not is_tls_refusal(error):
        return PeerBusy("it hung up before the TLS handshake ended")
    return HandshakeError(f"{what}: {_explain(error)}")


def is_tls_refusal(error: BaseException | None) -> bool:
    """Return True if TLS itself refused the connection, and False if the connection only ended."""
    ended = ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLSyscallError | ssl.SSLWantReadError
    return isinstance(error, ssl.SSLError) and not isinstance(error, ended)


def _require_cipher(sock: ssl.SSLSocket) -> None:
    """Check the cipher suite: a system's OpenSSL configuration can offer others, and Python cannot choose
    them.

    Raises `HandshakeError` for a suite outside the list.
    """
    chosen = sock.cipher()
    if chosen is None or chosen[0] not in _CIPHERS:
        sock.close()
        named = "no cipher" if chosen is None else chosen[0]
        raise HandshakeError(
            f"TLS chose {named}, expected one of {', '.join(sorted(_CIPHERS))}",
            hint="look for Ciphersuites in OpenSSL's configuration (OPENSSL_CONF) of both machines",
        )


def peer_certificate(sock: ssl.SSLSocket) -> bytes:
    """Return the DER of the certificate that the other end proved to hold.

    Raises `HandshakeError` without one.
    """
    certificate = sock.getpeercert(binary_form=True)
    if certificate is None:
        raise HandshakeError("the other end showed no certificate")
    return certificate


def tune_socket(sock: socket.socket) -> None:
    """Send small frames at once, and notice a silent host after 25 s."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "darwin":
        sock.setsockopt(socket.IPPROTO_TCP, _DARWIN_TCP_KEEPALIVE, _KEEPALIVE_IDLE_S)
    else:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)


def _explain(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not in the roster ({error.verify_message})"
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or "the connection broke").lower().replace("_", " ")
        return f"TLS: {reason}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return "the stream is closed"
