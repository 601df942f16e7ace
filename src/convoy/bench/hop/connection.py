"""Open the connections of the hop bench, two TCP connections per way as in a link, and make their keys."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from convoy.bench.hop.names import ECHO, HOME, HOST, ROSTER
from convoy.bench.hop.plain import PlainStream
from convoy.crypto.identity import Identity, OperatorKey
from convoy.errors import HandshakeError, PeerUnreachable
from convoy.transport.member import LocalMember, Member
from convoy.transport.membership import Membership
from convoy.transport.options import LinkOptions
from convoy.transport.streams.tcp import (
    TlsStream,
    client_context,
    peer_certificate,
    server_context,
    start_tls_client,
    start_tls_server,
    tune_socket,
)
from convoy.trust.roster.authority import open_membership
from convoy.trust.roster.card import member_of
from convoy.trust.roster.roster import make_roster, sign_roster

_STALL_S = LinkOptions().stall_timeout_s


def make_members(directory: Path) -> bytes:
    """Write two identities and a signed roster into ``directory``; return the operator's public key."""
    operator = OperatorKey.generate()
    members: list[Member] = []
    for name in (HOME, ECHO):
        identity = Identity.generate()
        identity.save(directory / name)
        members.append(member_of(name, identity, (HOST, len(members) + 1), head=name == HOME))
    (directory / ROSTER).write_bytes(sign_roster(make_roster("bench", members), operator))
    return operator.public_key


def bench_member(directory: Path, name: str, operator_key: bytes) -> Membership:
    """Open one of the two members, as its own process sees itself."""
    signed, identity = (directory / ROSTER).read_bytes(), Identity.load(directory / name)
    return open_membership(name, identity, signed, operator_key=operator_key).membership


def dial_tls(port: int, me: LocalMember, timeout_s: float) -> tuple[TlsStream, TlsStream]:
    """Dial (outgoing, incoming) streams with the outer layer alone."""
    deadline_s = time.monotonic() + timeout_s
    context = client_context(me)
    certificate = me.roster.member(HOME).certificate_der
    streams = []
    for _ in range(2):
        sock = start_tls_client(socket.create_connection((HOST, port), timeout_s), context, deadline_s)
        if peer_certificate(sock) != certificate:
            raise HandshakeError("the bench's listener shows the certificate of another member")
        streams.append(TlsStream(sock, _STALL_S))
    return streams[0], streams[1]


def accept_tls(listener: socket.socket, me: LocalMember, timeout_s: float) -> tuple[TlsStream, TlsStream]:
    """Accept (outgoing, incoming) streams. The dialler's first connection is our incoming one."""
    deadline_s = time.monotonic() + timeout_s
    context = server_context(me)
    certificate = me.roster.member(ECHO).certificate_der
    streams = []
    for _ in range(2):
        sock = start_tls_server(_accept(listener, timeout_s), context, deadline_s)
        if peer_certificate(sock) != certificate:
            raise HandshakeError("a connection to the bench shows the certificate of another member")
        streams.append(TlsStream(sock, _STALL_S))
    return streams[1], streams[0]


def dial_plain(port: int, timeout_s: float) -> tuple[PlainStream, PlainStream]:
    """Dial (outgoing, incoming) streams without any sealing."""
    outgoing, incoming = (_plain(socket.create_connection((HOST, port), timeout_s)) for _ in range(2))
    return outgoing, incoming


def accept_plain(listener: socket.socket, timeout_s: float) -> tuple[PlainStream, PlainStream]:
    """Accept (outgoing, incoming) streams. The dialler's first connection is our incoming one."""
    incoming, outgoing = (_plain(_accept(listener, timeout_s)) for _ in range(2))
    return outgoing, incoming


def _plain(sock: socket.socket) -> PlainStream:
    tune_socket(sock)
    sock.settimeout(None)
    return PlainStream(sock)


def _accept(listener: socket.socket, timeout_s: float) -> socket.socket:
    listener.settimeout(timeout_s)
    try:
        return listener.accept()[0]
    except TimeoutError:
        raise PeerUnreachable(f"the second process did not connect within {timeout_s:g} s") from None
