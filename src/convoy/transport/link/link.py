"""A sealed link to one other member: it delivers messages and tensors in order, or an error with the
reason.

Two halves stand inside, `Outgoing` and `Incoming`, each with its own connection, key and counter. They
share only the end of the link.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from convoy.crypto.seal import FrameOpener, FrameSealer
from convoy.errors import ConvoyError, FrameTooLong, LinkBroken, LinkClosed, PeerLeft, PeerUnreachable
from convoy.transport.link.facts import LinkFacts
from convoy.transport.link.incoming import (
    LINK_TYPES,
    Incoming,
    ReadEnd,
    Received,
    ReceivedMessage,
    ReceivedTensor,
    max_tensor_bytes,
)
from convoy.transport.link.outgoing import Outgoing, OutgoingFrame, message_frame
from convoy.transport.link.pings import Pings
from convoy.transport.link.reader import Reader
from convoy.transport.link.replacement import Connections, Replacement
from convoy.transport.options import LinkOptions
from convoy.transport.streams.stream import Stream
from convoy.wire.frame import TENSOR_TYPES, cluster_tag
from convoy.wire.messages.control import FrameType, Message
from convoy.wire.messages.link import Bye, Ping, Pong, RosterUpdate, Switch
from convoy.wire.tensor import WireTensor

__all__ = ["Link", "LinkOptions", "Received", "ReceivedMessage", "ReceivedTensor"]

_log = logging.getLogger(__name__)

Deliver = Callable[["Link", Received], None]
Ended = Callable[["Link", ConvoyError], None]

_MAX_REASON = 200
_HELD_S = 0.25


class Link:
    """Connect this process with one other member.

    `dial` or a `Listener` makes it. Call ``start`` before any other method but ``send`` and ``close``.
    ``link_id`` (16 bytes) is public. ``binding`` (32 bytes) is known only to the two ends of this
    handshake. ``replaces`` is the id of the link that the dialler wants this one to replace, or zeros.
    """

    def __init__(
        self,
        *,
        facts: LinkFacts,
        streams: tuple[Stream, Stream],
        sealing: tuple[FrameSealer, FrameOpener],
        options: LinkOptions,
        read_end: ReadEnd,
    ) -> None:
        self.facts = facts
        self.peer = peer = facts.member.name
        self.link_id = facts.link_id
        self.binding = facts.binding
        self.replaces = facts.replaces
        self.cipher = facts.cipher
        # Unix time of the handshake that gave the present keys.
        self.keyed_unix_s = time.time()
        self.on_roster: Callable[[Link, bytes], None] = lambda _link, _signed: None
        self.on_over: Callable[[], None] = lambda: None
        self._options = options
        self._streams: tuple[Stream, ...] = streams
        cluster = cluster_tag(facts.cluster_id)
        self._replacement = Replacement(peer, options, self._commit)
        begin = self._replacement.begin
        self._outgoing = Outgoing(streams[0], sealing[0], cluster, options, self._end, on_limit=begin)
        self._incoming = Incoming(streams[1], sealing[1], cluster, options, read_end, on_limit=begin)
        self.reader = Reader(lambda: self._incoming, self._is_ours, self._is_going)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._error: ConvoyError | None = None
        self._closing: LinkClosed | None = None
        self._pings = Pings(peer, self._outgoing)
        self._threads: list[threading.Thread] = []
        # Hidden states only; other tensors and messages are no hops.
        self.sent_hops = self.received_hops = 0

    @property
    def sent_sealed_bytes(self) -> int:
        return self._outgoing.num_bytes

    @property
    def received_sealed_bytes(self) -> int:
        return self._incoming.num_bytes

    @property
    def sent_frames(self) -> int:
        return self._outgoing.num_frames

    @property
    def received_frames(self) -> int:
        return self._incoming.num_frames

    @property
    def is_over(self) -> bool:
        return self._error is not None

    @property
    def heard_s(self) -> float:
        """Return when the last bytes came (``time.monotonic``), or now while the receiver works on one."""
        since_s = self._incoming.deadline.since_s
        return time.monotonic() if since_s is None else since_s

    def start(self, deliver: Deliver, ended: Ended, allowed: frozenset[FrameType]) -> None:
        """Begin to receive. ``deliver`` runs on the receiver thread, and holds the peer back by blocking.

        ``ended`` is called exactly once, last, on the same thread: with `LinkClosed` after ``close``
        here, otherwise with the error that broke the link. ``allowed`` holds the frame types that this
        peer may send. Any other type ends the link.
        """
        receive = threading.Thread(
            target=self._receive, args=(deliver, ended, allowed | LINK_TYPES), name=f"receive {self.peer}"
        )
        self._threads = [
            receive,
            threading.Thread(target=self._outgoing.run, name=f"send {self.peer}"),
            threading.Thread(target=self._watch, name=f"watch {self.peer}"),
        ]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def send(self, message: Message, *, plan_id: int = 0, step: int = 0) -> None:
        """Send a message in order, and block while the queue is full.

        Raises `LinkBroken`, `LinkClosed` or `FrameTooLong`.
        """
        _check_position(plan_id, step, 0)
        self._outgoing.send(message_frame(message, plan_id, step))

    def post(self, message: Message) -> bool:
        """Queue a message for the sender thread without waiting for the peer.

        Return False if there is no room.

        Raises the errors of `send`.
        """
        return self._outgoing.post(message_frame(message), 0.0)

    def send_tensor(
        self,
        tensor: WireTensor,
        *,
        plan_id: int,
        step: int,
        boundary: int,
        kind: FrameType = FrameType.HIDDEN,
        until_s: float | None = None,
    ) -> bool:
        """Send a hidden state that goes into layer ``boundary``, or another tensor of `TENSOR_TYPES`.

        The tensor's memory must not change afterwards, because the tensor may be queued. With ``until_s``
        (``time.monotonic``) it is always queued, and False means that there was no room by then. Raises
        `FrameTooLong` over the kind's limit, and the errors of `send`.
        """
        _check_position(plan_id, step, boundary)
        assert kind in TENSOR_TYPES, "only frames of tensors carry one"
        limit = max_tensor_bytes(kind, self._options)
        if tensor.nbytes > limit:
            raise FrameTooLong(f"a tensor of {tensor.nbytes} bytes is over the limit of {limit}")
        frame = OutgoingFrame(kind, plan_id, step, boundary, tensor=tensor)
        if until_s is not None:
            return self._outgoing.post(frame, until_s)
        self._outgoing.send(frame)
        self.sent_hops += kind is FrameType.HIDDEN
        return True

    def ping(self, timeout_s: float) -> float:
        """Return the round trip in seconds, through both layers both ways.

        Raises `PeerUnreachable` after ``timeout_s``, or `LinkBroken`.
        """
        return self._pings.ask(timeout_s)

    def is_there(self, timeout_s: float) -> bool:
        """Return whether the peer gives a sign of life within ``timeout_s``: a PONG, or any other frame.

        A ping queues behind everything under way to the peer, and the peer does not read it while its
        owner is overloaded. The same holds here: a receiver that is held up cannot tell that nothing
        came, so the peer counts as alive. Raises `LinkBroken`.
        """
        before = self.received_frames
        try:
            self.ping(timeout_s)
        except PeerUnreachable:
            return self.received_frames != before or self._incoming.deadline.busy_s is not None
        return True

    def replace_with(self, redial: Callable[[], Link]) -> None:
        """Set, at the dialler, the function that makes a link to replace this one's used-up connections."""
        self._replacement.redial = lambda: redial().release()

    def release(self) -> Connections:
        """Give away the connections of a link that was not started. This link is over then."""
        with self._lock:
            self._error = LinkClosed("its connections were given away")
        self._over.set()
        streams = (self._streams[0], self._streams[1])
        return Connections(self.link_id, self.cipher, streams, self._outgoing, self._incoming)

    def keep(self, fresh: Link) -> None:
        """Keep, at the listener, the connections of ``fresh``, which names this link as the one that it
        replaces.

        Raises `ConvoyError`; then ``fresh`` is closed.
        """
        connections = fresh.release()
        self._replacement.keep(connections)
        try:
            connections.outgoing.send(message_frame(Switch(connections.link_id)))
        except ConvoyError:
            connections.close()
            raise

    def post_roster(self, signed: bytes) -> None:
        """Queue a newer roster without waiting. Do nothing if the link is over."""
        self._outgoing.post_roster(message_frame(RosterUpdate(signed)))

    def revoke(self, reason: str) -> None:
        """Close the link as `close` does, but send only the reason: the peer may not have the queued
        frames.
        """
        self._close(LinkClosed(f"this side closed the link to {self.peer}: {reason}"), reason, revoke=True)

    def close(self, reason: str = "") -> None:
        """Say goodbye, end both connections, and wait for the threads, except for the calling one.

        May be called twice.
        """
        self._close(LinkClosed(f"this side closed the link to {self.peer}"), reason, revoke=False)

    def dismiss(self, reason: str = "", *, revoke: bool = False) -> None:
        """Close or revoke the link on a thread of its own: a peer that does not hang up must not delay
        the caller.
        """
        end = self.revoke if revoke else self.close
        threading.Thread(target=end, args=(reason,), name=f"dismiss {self.peer}", daemon=True).start()

    def _close(self, error: LinkClosed, reason: str, *, revoke: bool) -> None:
        with self._lock:
            if self._error is not None or self._closing is not None:
                return
            # Set first, so that the errors of ending threads count as this close.
            self._closing = error
        bye = message_frame(Bye(reason[:_MAX_REASON]))
        timeout_s = self._options.close_timeout_s
        # A revoked member is cut off within a second, whether or not it reads the goodbye and hangs up.
        farewell_s = timeout_s / 4 if revoke else timeout_s
        self._outgoing.finish(bye, timeout_s=farewell_s, drop=revoke)
        for thread in self._threads[:1]:
            # The peer hangs up once it has read our goodbye, which ends the receiver thread.
            _join(thread, farewell_s)
        self._end(error)
        for thread in self._threads:
            _join(thread, timeout_s)

    def _end(self, error: ConvoyError) -> None:
        """End both connections, and wake senders and pings. The first error is the one that counts."""
        with self._lock:
            if self._error is None:
                self._error = self._closing or error
        # Outside the lock, because these calls wake threads that may take it.
        self._outgoing.end(self._error)
        self._incoming.deadline.over = True
        self._over.set()
        self._replacement.end()
        for stream in self._streams:
            stream.close()
        if not self._threads:
            self._incoming.wipe()
        self._pings.end()
        self.on_over()

    # The watch has a thread of its own, so that neither a blocked send nor a blocked ``deliver`` stops it.

    def _watch(self) -> None:
        """Send something at least every ``ping_after_s``, and end the link once nothing has come for too
        long.

        While the receiver is held back it reads no ping, so this end sends a sign of life unasked. That
        is a PONG, because the answer to a PING would wait in the queue that is held back.

        TCP's keepalive does not notice the loss of only one of the two connections, nor a peer that
        hangs.
        """
        options = self._options
        shortest_s = min(options.ping_after_s, options.gone_after_s, options.stall_timeout_s)
        period_s = min(_HELD_S, shortest_s / 4)
        while not self._over.wait(period_s):
            now_s = time.monotonic()
            wrong = None if self._closing else self._incoming.deadline.verdict(now_s, options.gone_after_s)
            if wrong is not None:
                self._end(LinkBroken(f"{self.peer} is gone: {wrong}"))
                return
            if now_s - self._outgoing.sent_s >= options.ping_after_s:
                self._pings.send()
            held_s, sent_s = self._incoming.deadline.busy_s, self._outgoing.sent_s
            if held_s is not None and now_s - max(held_s, sent_s) >= _HELD_S / 2 and not self._closing:
                self._pings.say_alive()

    # The receiver thread.

    def _receive(self, deliver: Deliver, ended: Ended, allowed: frozenset[FrameType]) -> None:
        try:
            error = self._receive_until_end(deliver, allowed)
        except ConvoyError as broken:
            error = broken
        # The other end must not wait for a dead thread, so a bug ends the link too, and is logged.
        except BaseException as bug:  # noqa: BLE001
            _log.exception("a receiver of the link to %s failed", self.peer)
            error = LinkBroken(f"this side failed on the link to {self.peer}: {type(bug).__name__}")
        self._end(error)
        self.reader.end()
        self._incoming.wipe()
        ended(self, self._error or error)

    def _receive_until_end(self, deliver: Deliver, allowed: frozenset[FrameType]) -> ConvoyError:
        def take(received: Received) -> None:
            self.received_hops += isinstance(received, ReceivedTensor) and received.kind is FrameType.HIDDEN
            deliver(self, received)

        self.reader.run(take, allowed)
        if self._error is None:
            self._incoming.discard_until_end()
        return LinkClosed(f"this side closed the link to {self.peer}")

    def _is_going(self) -> bool:
        return self._error is None and self._closing is None

    def _switch(self, fresh: Connections) -> None:
        """Read the peer's direction from ``fresh`` on.

        At the listener, move the own direction to ``fresh`` too.
        """
        self._incoming.retire()
        fresh.incoming.succeed(self._incoming, self._replacement.begin)
        with self._lock:
            self._incoming = fresh.incoming
            self.cipher = fresh.cipher
            self.keyed_unix_s = time.time()
        if self._replacement.redial is None:
            try:
                # ``fresh`` is read from already, so the end of the link must close it even if SWITCH fails.
                self._hold(fresh)
                self._say_switch(fresh)
            except ConvoyError as error:
                fresh.outgoing.end(error)
                # A link that is being closed says goodbye over its old connection, which is no failure.
                if not isinstance(error, LinkClosed):
                    raise

    def _commit(self, fresh: Connections) -> None:
        """Move, at the dialler, the link's own direction to ``fresh``, from its SWITCH on.

        Raises `ConvoyError`; then nothing here has changed.
        """
        self._say_switch(fresh)
        self._hold(fresh)

    def _say_switch(self, fresh: Connections) -> None:
        """Queue SWITCH, the last frame of the outgoing connection. Later frames go over ``fresh``."""
        switch = message_frame(Switch(fresh.link_id))
        self._outgoing.post_switch(switch._replace(onto=fresh.outgoing))

    def _hold(self, fresh: Connections) -> None:
        """Let the end of the link close ``fresh`` too. Raises `LinkBroken` if the link has ended already."""
        with self._lock:
            # At most three pairs are in use: the one that still sends, the one its SWITCH names, and this.
            self._streams = (*self._streams[-4:], *fresh.streams)
            over = self._error is not None
        if over:
            for stream in fresh.streams:
                stream.close()
            raise LinkBroken(f"the link to {self.peer} ended before its connections were replaced")

    def _is_ours(self, message: Message) -> bool:
        match message:
            case Ping(token=token):
                self._pings.answer(token)
            case Pong(token=token):
                self._pings.answered(token)
            case Switch(link_id=link_id):
                self._switch(self._replacement.take(link_id))
            case RosterUpdate(signed=signed):
                self.on_roster(self, signed)
            case Bye(reason=reason):
                raise PeerLeft(f"{self.peer} closed the link: {reason or 'no reason given'}")
            case _:
                return False
        return True


def _join(thread: threading.Thread, timeout_s: float) -> None:
    # A thread that `start` has not started yet finds the link over, and ends by itself.
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(timeout_s)


def _check_position(plan_id: int, step: int, boundary: int) -> None:
    if not (0 <= plan_id < 2**64 and 0 <= step < 2**64 and 0 <= boundary < 2**16):
        raise ValueError(f"plan id {plan_id}, step {step} or boundary {boundary} does not fit a header")
