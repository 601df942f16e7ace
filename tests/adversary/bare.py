"""Links without their outer layer, in a test's process alone: where TLS stood, each end says in clear which
certificate it would have proved to hold. Everything else is the product's own code.
"""

from __future__ import annotations

import socket
import ssl
import time
from typing import Any

import convoy.transport.dial as dialling
import convoy.transport.listen.listener as listening
from convoy.crypto.certificate import certificate_fingerprint
from convoy.errors import HandshakeError
from convoy.transport.member import LocalMember
from convoy.transport.streams.tcp import tune_socket


class BareSocket(socket.socket):
    """Wrap a TCP connection as a TLS one to an end that showed ``peer_der``."""

    peer_der: bytes = b""

    def getpeercert(self, binary_form: bool = False) -> bytes:
        return self.peer_der

    def cipher(self) -> tuple[str, str, int]:
        return ("none", "none", 0)

    def pending(self) -> int:
        """Return 0: it keeps nothing."""
        return 0


def bare_handshake(sock: socket.socket, me: LocalMember, deadline_s: float) -> BareSocket:
    """Let both ends name themselves, without a proof. The inner layer has to stand this."""
    tune_socket(sock)
    bare = BareSocket(sock.family, sock.type, sock.proto, fileno=sock.detach())
    try:
        bare.settimeout(max(0.001, deadline_s - time.monotonic()))
        bare.sendall(certificate_fingerprint(me.member.certificate_der))
        said = b""
        while len(said) < 32:
            part = bare.recv(32 - len(said))
            if not part:
                raise HandshakeError("the other end hung up before it said who it is")
            said += part
    except OSError as error:
        bare.close()
        raise HandshakeError(f"the other end did not say who it is: {error}") from error
    except HandshakeError:
        bare.close()
        raise
    for member in me.roster.members:
        if certificate_fingerprint(member.certificate_der) == said:
            bare.peer_der = member.certificate_der
    return bare


def take_away_the_outer_layer(me: LocalMember) -> None:
    """Leave links that this process dials or accepts from now on with the inner layer alone."""

    def start(sock: socket.socket, _context: ssl.SSLContext, deadline_s: float) -> Any:
        return bare_handshake(sock, me, deadline_s)

    vars(dialling)["start_tls_client"] = start
    vars(listening)["start_tls_server"] = start
