"""Open a link to another member: two TLS connections, one handshake over both."""

from __future__ import annotations

import functools
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from convoy.crypto.claims import LINK_ID_BYTES, NO_LINK
from convoy.errors import (
    HandshakeError,
    Incompatible,
    LinkBroken,
    PeerUnreachable,
    RosterError,
)
from convoy.transport.admission import place_of
from convoy.transport.link.establish import (
    TO_DIALLER,
    TO_LISTENER,
    broke_off,
    establish_initiator,
    send_opening,
)
from convoy.transport.link.link import Link
from convoy.transport.member import LocalMember, Member
from convoy.transport.membership import Membership
from convoy.transport.options import LinkOptions
from convoy.transport.streams.stream import Stream
from convoy.transport.streams.tcp import TlsStream, client_context, peer_certificate, start_tls_client
from convoy.transport.transfer import settle

Wrap = Callable[[Stream], Stream]
# Each dial but the last moves one end to a newer roster.
_MAX_DIALS = 3
# The tuple that getaddrinfo returns.
_Place = tuple[Any, Any, int, str, tuple[Any, ...]]


def dial(
    address: tuple[str, int],
    *,
    me: Membership,
    peer_name: str,
    timeout_s: float,
    options: LinkOptions | None = None,
    wrap: Wrap | None = None,
    replaces: bytes = NO_LINK,
) -> Link:
    """Return a link to ``peer_name`` at ``address``, not yet started.

    All of it happens within ``timeout_s``, the lookup of a host name included, however many addresses the
    name has. If one end holds an older roster, it first receives the newer one, and the dial begins
    again.

    Raises `PeerUnreachable` naming peer and address, `HandshakeError`, `Incompatible`, `IdentityError` if
    our own keys cannot be read, or `RosterError` if our own roster is not valid now or does not list the
    peer. ``wrap`` puts a stream between the two layers; tests record there. ``replaces``: see
    `Link.replace_with`.
    """
    options = options or LinkOptions()
    if peer_name == me.name:
        raise RosterError(f"{me.name} cannot link with itself")
    deadline_s = time.monotonic() + timeout_s
    for _ in range(_MAX_DIALS):
        me.require_valid()
        snapshot = me.current
        peer = snapshot.roster.member(peer_name)
        link = _open(address, snapshot, peer, deadline_s, options=options, wrap=wrap, replaces=replaces)
        if settle(link, me):
            break
    else:
        raise Incompatible(f"{peer_name} and {me.name} did not come to one roster in {_MAX_DIALS} handshakes")
    if replaces == NO_LINK:
        me.attach(link)
    else:
        me.require(link)
    time_s = options.handshake_timeout_s
    again = functools.partial(dial, address, me=me, peer_name=peer_name, timeout_s=time_s)
    link.replace_with(functools.partial(again, options=options, wrap=wrap, replaces=link.link_id))
    return link


def _open(
    address: tuple[str, int],
    me: LocalMember,
    peer: Member,
    deadline_s: float,
    *,
    options: LinkOptions,
    wrap: Wrap | None,
    replaces: bytes,
) -> Link:
    # Both connections name this id, by which the listener pairs them.
    link_id = os.urandom(LINK_ID_BYTES)
    streams: list[Stream] = []
    try:
        for direction in (TO_LISTENER, TO_DIALLER):
            stream = _connect(address, me, peer, deadline_s, options)
            streams.append(stream)
            if wrap is not None:
                streams[-1] = stream = wrap(stream)
            stream.set_deadline(min(deadline_s, time.monotonic() + options.handshake_timeout_s))
            send_opening(stream, direction, link_id)
        both = (streams[0], streams[1])
        return establish_initiator(me, peer, link_id, both, options, replaces=replaces)
    except BaseException as error:
        for stream in streams:
            stream.close()
        if isinstance(error, LinkBroken):
            raise broke_off(peer.name, error) from error
        raise


def _connect(
    address: tuple[str, int], me: LocalMember, peer: Member, deadline_s: float, options: LinkOptions
) -> Stream:
    where = f"{peer.name} at {address[0]}:{address[1]}"
    context = client_context(me)
    try:
        sock = _connect_tcp(address, deadline_s)
    except (OSError, UnicodeError, OverflowError) as error:
        reason = "did not answer in time" if isinstance(error, TimeoutError) else address_error(error)
        raise PeerUnreachable(
            f"{where} could not be reached: {reason}", hint="is it started there, and is the address right?"
        ) from error
    until_s = min(deadline_s, time.monotonic() + options.handshake_timeout_s)
    try:
        secured = start_tls_client(sock, context, until_s)
    except PeerUnreachable as error:
        raise type(error)(f"{where} took the connection, but {error.message}") from error
    except HandshakeError as error:
        raise HandshakeError(f"{where}: {error.message}", hint=error.hint) from error
    if peer_certificate(secured) != peer.certificate_der:
        secured.close()
        raise HandshakeError(f"{where} shows the certificate of another member")
    return TlsStream(secured, options.stall_timeout_s)


def _connect_tcp(address: tuple[str, int], deadline_s: float) -> socket.socket:
    """Connect to the first address that answers.

    Each address of a name gets an equal share of the remaining time.

    `socket.create_connection` would give the whole time to each address.
    """
    found = _look_up(address, deadline_s)
    failed: OSError = OSError("the name has no address")
    for index, (family, kind, protocol, _, place) in enumerate(found):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(max(0.001, (deadline_s - time.monotonic()) / (len(found) - index)))
            sock.connect(place)
        except OSError as error:
            sock.close()
            failed = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failed


def _look_up(address: tuple[str, int], deadline_s: float) -> list[_Place]:
    """Call `socket.getaddrinfo` within the deadline. Raises `TimeoutError` and the errors of that call.

    The system's resolver takes no deadline from us, so a lookup runs on a daemon thread. After the
    deadline that thread is left alone; the resolver has a timeout of its own.
    """
    found: queue.SimpleQueue[list[_Place] | Exception] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            found.put(socket.getaddrinfo(*address, type=socket.SOCK_STREAM))
        except Exception as error:  # noqa: BLE001 - raised again by the thread that waits
            found.put(error)

    if place_of(address[0]) is not None:
        # A numeric address needs no resolver, so it needs no thread either.
        look_up()
    else:
        threading.Thread(target=look_up, name=f"look up {address[0]}", daemon=True).start()
    try:
        answer = found.get(timeout=max(0.001, deadline_s - time.monotonic()))
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def address_error(error: OSError | UnicodeError | OverflowError) -> str:
    """Return why a socket could not take an address: the system's words, or that the address cannot exist."""
    if isinstance(error, UnicodeError | OverflowError):
        return "no such address can exist"
    if isinstance(error, socket.gaierror) or error.errno is None:
        return (error.strerror or type(error).__name__).lower()
    # `socket.create_server` writes a tuple into the text of its errors, so the number is translated here.
    return os.strerror(error.errno).lower()
