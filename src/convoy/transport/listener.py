"""Accept links from other members: each connection is judged in a thread of its own, never in the accept
loop.

A connection counts as half-open until its link stands; beyond ``max_half_open`` new ones are closed at once.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from convoy.errors import ConfigError, ConvoyError, HandshakeError, LinkBroken
from convoy.transport.dial import Wrap, address_error
from convoy.transport.establish import TO_LISTENER, establish_responder, receive_opening
from convoy.transport.link import Link
from convoy.transport.member import LocalMember, Member
from convoy.transport.options import LinkOptions
from convoy.transport.stream import Stream
from convoy.transport.tcp import TlsStream, peer_certificate, server_context, start_tls_server

_log = logging.getLogger(__name__)

_BACKLOG = 128
_ACCEPT_POLL_S = 1.0


@dataclass(slots=True)
class _Half:
    """A connection that waits for the other one of its link."""

    stream: Stream
    direction: int
    paired: threading.Event = field(default_factory=threading.Event)


class Listener:
    """Listens from construction to ``close``. ``on_link`` gets each new link, not yet started, on a handshake
    thread.

    ``on_refused`` gets the cause of each handshake that failed; it is logged in any case. Raises
    `ConfigError` if the port is taken or the address is not of this machine, `IdentityError` if our own keys
    cannot be read.
    """

    def __init__(
        self,
        bind: tuple[str, int],
        me: LocalMember,
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
        self._context = server_context(me)
        self._slots = threading.Semaphore(self._options.max_half_open)
        self._lock = threading.Lock()
        self._halves: dict[tuple[str, bytes], _Half] = {}
        self._closed = threading.Event()
        self._socket = _bind(bind)
        self._socket.settimeout(_ACCEPT_POLL_S)
        host, port = self._socket.getsockname()[:2]
        self.address: tuple[str, int] = (host, port)
        self._thread = threading.Thread(target=self._accept, name="accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting; a handshake under way ends without a link. Links that stand already live on."""
        with self._lock:
            self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept() on Linux; elsewhere its timeout does
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _ACCEPT_POLL_S)
        self._socket.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, address = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:
                if self._closed.wait(0.05):
                    return
                continue  # out of descriptors: some come back
            if not self._slots.acquire(blocking=False):
                busy = self._options.max_half_open
                _log.warning(
                    "refused a connection from %s: %d handshakes are under way", _text(address), busy
                )
                sock.close()
                continue
            judge = threading.Thread(
                target=self._judge, args=(sock, _text(address)), name="handshake", daemon=True
            )
            try:
                judge.start()
            except RuntimeError as error:  # no thread to be had: some come back
                _log.warning("refused a connection from %s: %s", _text(address), error)
                self._slots.release()
                sock.close()

    def _judge(self, sock: socket.socket, where: str) -> None:
        try:
            link = self._handshake(sock)
        except ConvoyError as error:
            _log.warning("refused a connection from %s: %s", where, error.message)
            if self._on_refused is not None:
                self._on_refused(error)
            return
        finally:
            self._slots.release()
        if link is not None:
            self._hand_over(link)

    def _hand_over(self, link: Link) -> None:
        with self._lock:
            late = self._closed.is_set()
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

    def _handshake(self, sock: socket.socket) -> Link | None:
        """The link, if this connection completes one; None if another thread takes this connection over."""
        deadline_s = time.monotonic() + self._options.handshake_timeout_s
        secured = start_tls_server(sock, self._context, deadline_s)
        stream: Stream = TlsStream(secured, self._options.stall_timeout_s)
        try:
            if self._wrap is not None:
                stream = self._wrap(stream)
            stream.set_deadline(deadline_s)
            member = self._member_of(peer_certificate(secured))
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
        return establish_responder(self._me, member, link_id, streams, self._options)

    def _member_of(self, certificate_der: bytes) -> Member:
        self._me.roster.require_valid(datetime.datetime.now(datetime.UTC))
        member = self._me.roster.member_with_certificate(certificate_der)
        if member is None or member.name == self._me.name:
            raise HandshakeError("a connection shows a certificate that no other member has")
        return member

    def _pair(
        self, member: Member, link_id: bytes, direction: int, stream: Stream, deadline_s: float
    ) -> Stream | None:
        """The other connection of the link, or None once another thread has taken this one.

        Raises `HandshakeError`.
        """
        key = (member.name, link_id)
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
                return None  # taken in the last moment
        raise HandshakeError(f"{member.name} opened one connection of a link, and the other never came")


def _text(address: object) -> str:
    """What accept() gives: (host, port, ...)."""
    host, port = address[:2] if isinstance(address, tuple) else (address, "")
    return f"{host} port {port}"


def _bind(bind: tuple[str, int]) -> socket.socket:
    host, port = bind
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError, OverflowError) as error:
        reason = address_error(error)
        raise ConfigError(
            f"cannot listen on {host}:{port}: {reason}",
            hint="another process has the port, or the address is not of this machine",
        ) from error
