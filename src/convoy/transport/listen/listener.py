"""Accept links from other members.

Each connection is judged in a thread of its own, never in the accept loop. A connection counts as
half-open until its link stands; `Admission` limits how many there may be, and from where.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from convoy.crypto.claims import NO_LINK
from convoy.errors import ConfigError, ConvoyError, HandshakeError, LinkBroken
from convoy.transport.admission import Admission, LinkRefusal, Ticket
from convoy.transport.dial import Wrap, address_error
from convoy.transport.link.establish import TO_LISTENER, establish_responder, receive_opening
from convoy.transport.link.link import Link
from convoy.transport.log_limit import RateLimitedLog
from convoy.transport.member import LocalMember, Member, Roster
from convoy.transport.membership import Membership
from convoy.transport.options import LinkOptions
from convoy.transport.streams.stream import Stream
from convoy.transport.streams.tcp import TlsStream, peer_certificate, server_context, start_tls_server
from convoy.transport.transfer import settle

_log = logging.getLogger(__name__)

_BACKLOG = 512
_ACCEPT_POLL_S = 1.0


@dataclass(slots=True)
class _Half:
    """Hold a connection that waits for the other one of its link."""

    stream: Stream
    direction: int
    paired: threading.Event = field(default_factory=threading.Event)


class Listener:
    """Listen from construction to ``close``.

    ``on_link`` gets each new link, not yet started, on a handshake thread.

    ``on_refused`` gets the cause of each handshake that failed. The cause is logged in any case.

    Each roster that ``me`` adopts renews the trust anchors. A handshake that began under another roster
    is judged again at its end. Raises `ConfigError` if the port is taken or the address is not of this
    machine, and `IdentityError` if our own keys cannot be read.
    """

    def __init__(
        self,
        bind: tuple[str, int],
        me: Membership,
        on_link: Callable[[Link], None],
        *,
        options: LinkOptions | None = None,
        wrap: Wrap | None = None,
        on_refused: Callable[[ConvoyError], None] | None = None,
    ) -> None:
        self._me = me
        self._on_link = on_link
        self._options = options or LinkOptions()
        self._wrap = wrap
        self._on_refused = on_refused
        self.admission = Admission(self._options.admission, self._options.max_half_open)
        self._adopt(me.roster)
        self._refused = RateLimitedLog(_log)
        self._lock = threading.Lock()
        self._handed_over = threading.Condition(self._lock)
        # The threads that are inside ``on_link``; `close` waits for them.
        self._handing_over: set[int] = set()
        self._standing: dict[str, list[Link]] = {}
        self._halves: dict[tuple[str, bytes], _Half] = {}
        self._closed = threading.Event()
        self._socket = _bind(bind)
        self._socket.settimeout(_ACCEPT_POLL_S)
        host, port = self._socket.getsockname()[:2]
        self.address: tuple[str, int] = (host, port)
        self._unsubscribe = me.subscribe(self._adopt)
        self._thread = threading.Thread(target=self._accept, name="accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting. A handshake under way ends without a link. Standing links live on.

        No ``on_link`` begins after this returns. Wait for one that is under way for at most
        ``close_timeout_s``, but not if it is this thread's own.
        """
        self._unsubscribe()
        with self._lock:
            self._closed.set()
            mine = {threading.get_ident()}
            self._handed_over.wait_for(lambda: self._handing_over <= mine, self._options.close_timeout_s)
        with contextlib.suppress(OSError):
            # This wakes accept() on Linux; on other systems its timeout does.
            self._socket.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _ACCEPT_POLL_S)
        self._socket.close()
        self._refused.flush(everything=True)

    def _adopt(self, roster: Roster) -> None:
        self._context = server_context(self._me.current)
        self.admission.list_addresses(member.address[0] for member in roster.members)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, address = self._socket.accept()
            except TimeoutError:
                self._refused.flush()
                continue
            except OSError:
                if self._closed.wait(0.05):
                    return
                # Out of descriptors. Some come back when other connections end.
                continue
            self._admit(sock, address)

    def _admit(self, sock: socket.socket, address: object) -> None:
        where = _text(address)
        try:
            # Cutting needs a second handle: the TLS socket may be closed by then, and its descriptor reused.
            cut = _Cut(sock.dup())
        except OSError:
            sock.close()
            return
        ticket = self.admission.admit(where[0], cut.cut)
        if isinstance(ticket, LinkRefusal):
            cut.close()
            sock.close()
            self._refuse(where, ticket.value, ticket.value)
            return
        judge = threading.Thread(
            target=self._judge, args=(sock, where, ticket, cut), name="handshake", daemon=True
        )
        try:
            judge.start()
        # The system has no thread left. Some come back when other handshakes end.
        except RuntimeError as error:
            ticket.release()
            cut.close()
            sock.close()
            self._refuse(where, "no thread", str(error))

    def _refuse(self, where: tuple[str, int], cause: str, text: str) -> None:
        self._refused.warning(cause, f"refused a connection from {where[0]} port {where[1]}: {text}")

    def _judge(self, sock: socket.socket, where: tuple[str, int], ticket: Ticket, cut: _Cut) -> None:
        try:
            link = self._handshake(sock, ticket, cut)
            if link is not None:
                self.admission.welcome(where[0])
                if link.replaces == NO_LINK:
                    self._hand_over(link)
                else:
                    self._keep(link)
        except ConvoyError as error:
            self._refuse(where, type(error).__name__, error.message)
            if self._on_refused is not None:
                self._on_refused(error)
        finally:
            cut.close()
            ticket.release()

    def _hand_over(self, link: Link) -> None:
        me = threading.get_ident()
        self._me.attach(link)
        with self._lock:
            late = self._closed.is_set()
            surplus = None if late else self._count(link)
            if not late:
                self._handing_over.add(me)
        if late:
            link.close("not taken: no longer listening")
            return
        try:
            self._on_link(link)
        except ConvoyError as error:
            _log.warning("the link from %s was not taken: %s", link.peer, error.message)
            link.close("not taken")
        except BaseException:
            link.close("not taken")
            raise
        finally:
            with self._lock:
                self._handing_over.discard(me)
                self._handed_over.notify_all()
        if surplus is not None:
            self._refused.warning("surplus links", f"{link.peer} has too many links: the most silent ends")
            surplus.close("too many links of one member")

    def _keep(self, fresh: Link) -> None:
        """Keep new connections for a link that stands here with the same member. Raises `ConvoyError`."""
        self._me.require(fresh)
        with self._lock:
            links = () if self._closed.is_set() else self._standing.get(fresh.peer, ())
            named = (link for link in links if link.link_id == fresh.replaces and not link.is_over)
            standing = next(named, None)
        if standing is None:
            fresh.release().close()
            raise HandshakeError(f"{fresh.peer} wants to replace a link that does not stand between us")
        standing.keep(fresh)

    def _count(self, link: Link) -> Link | None:
        """Count one more standing link of a member. Return the link to end if that is too many, or None.

        The link that has been silent for longest ends: a member that comes back after its machine or
        network failed must get in. The links it left behind are silent, while a living link is pinged.
        """
        for name, links in list(self._standing.items()):
            self._standing[name] = [other for other in links if not other.is_over]
            if not self._standing[name]:
                del self._standing[name]
        standing = self._standing.setdefault(link.peer, [])
        surplus = None
        if len(standing) >= self._options.max_links_per_member:
            surplus = min(standing, key=lambda other: other.heard_s)
            standing.remove(surplus)
        standing.append(link)
        return surplus

    def _handshake(self, sock: socket.socket, ticket: Ticket, cut: _Cut) -> Link | None:
        """Return the link if this connection completes one, or None if another thread takes this
        connection over.
        """
        deadline_s = time.monotonic() + self._options.handshake_timeout_s
        secured = start_tls_server(sock, self._context, deadline_s)
        stream: Stream = TlsStream(secured, self._options.stall_timeout_s)
        try:
            if self._wrap is not None:
                stream = self._wrap(stream)
            stream.set_deadline(deadline_s)
            me = self._me.current
            member = self._member_of(me, peer_certificate(secured))
            # A proved connection does not give way any more, so the number per member is limited.
            if not ticket.prove(member.name):
                raise HandshakeError(f"{member.name} has too many handshakes under way")
            # A connection with a member's certificate does not give way any more.
            cut.close()
            direction, link_id = receive_opening(stream)
            other = self._pair(member, link_id, direction, stream, deadline_s)
        except BaseException as error:
            stream.close()
            if isinstance(error, LinkBroken):
                raise HandshakeError(f"a connection broke off: {error.message}") from error
            raise
        if other is None:
            return None
        other.set_deadline(deadline_s)
        streams = (other, stream) if direction == TO_LISTENER else (stream, other)
        link = establish_responder(me, member, link_id, streams, self._options)
        return link if settle(link, self._me) else None

    def _member_of(self, me: LocalMember, certificate_der: bytes) -> Member:
        self._me.require_valid()
        member = me.roster.member_with_certificate(certificate_der)
        if member is None:
            raise HandshakeError("a connection shows a certificate that no other member has")
        if member.name == me.name:
            raise HandshakeError("it is our own certificate: `convoy doctor` here, or our keys elsewhere")
        return member

    def _pair(
        self, member: Member, link_id: bytes, direction: int, stream: Stream, deadline_s: float
    ) -> Stream | None:
        """Return the other connection of the link, or None once another thread has taken this one.

        Raises `HandshakeError`.
        """
        key = (member.name, link_id)
        # The thread of the first connection waits here. The second one's takes both and goes on.
        mine = _Half(stream, direction)
        with self._lock:
            waiting = self._halves.get(key)
            if waiting is not None and waiting.direction == direction:
                raise HandshakeError(f"{member.name} opened one direction of a link twice")
            if waiting is not None:
                del self._halves[key]
                waiting.paired.set()
                return waiting.stream
            self._halves[key] = mine
        if mine.paired.wait(max(0.0, deadline_s - time.monotonic())):
            return None
        with self._lock:
            if self._halves.pop(key, None) is None:
                # Another thread took it in the last moment.
                return None
        raise HandshakeError(f"{member.name} opened one connection of a link, and the other never came")


class _Cut:
    """Hold a second handle on a connection, to end it from any thread while it proves itself."""

    def __init__(self, sock: socket.socket) -> None:
        self._lock = threading.Lock()
        self._sock: socket.socket | None = sock

    def cut(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._sock is not None:
                self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()


def _text(address: object) -> tuple[str, int]:
    """Return the host and port of an address that accept() returned: (host, port, ...)."""
    host, port = address[:2] if isinstance(address, tuple) else (str(address), 0)
    return host, port


def _bind(bind: tuple[str, int]) -> socket.socket:
    host, port = bind
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        both = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server((host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except (OSError, UnicodeError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is taken",
                hint="is this member running already? `convoy doctor --config FILE` names the program that "
                "has the port",
            ) from error
        raise ConfigError(
            f"cannot listen on {host}:{port}: {address_error(error)}",
            hint="the address is not of this machine, or this user may not listen on that port",
        ) from error
