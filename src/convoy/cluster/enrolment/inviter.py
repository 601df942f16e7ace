"""The inviting end: it hears strangers, lets the first valid proof use the invitation up, and answers it.

No code here holds the operator key. Its holder decides about a `Newcomer` and hands the signed roster to
`Newcomer.accept`.
"""

from __future__ import annotations

import datetime
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from convoy.crypto.certificate import certificate_key
from convoy.crypto.enrolment import (
    NONCE_BYTES,
    OneTimeCertificate,
    Terms,
    check_commitment,
    check_hello,
    check_mac,
    check_signatures,
    code,
    listener_mac,
    transcript,
)
from convoy.errors import ConvoyError, FrameError, HandshakeError, IdentityError, InviteError, LinkBroken
from convoy.transport.listen.enrolment_listener import EnrolmentLimits, EnrolmentListener
from convoy.transport.listen.enrolment_tls import receive_enrolment, send_enrolment
from convoy.transport.streams.stream import Stream
from convoy.trust.consumption import Consumption
from convoy.trust.invite import Token
from convoy.wire.messages.enrolment import EnrolmentCard, EnrolmentType, Refusal, decode_card, decode_proof

PENDING = b"pending"
_LISTEN_S = 0.05
_HAND_OVER_S = 10.0
Judge = Callable[[EnrolmentCard], Refusal | None]


@dataclass(frozen=True, slots=True)
class Newcomer:
    """Hold a machine that used the invitation up and waits for an answer. ``host`` is its address."""

    card: EnrolmentCard
    code: str
    host: str
    stream: Stream = field(repr=False)
    _secret: bytes = field(repr=False)
    _spoken: bytes = field(repr=False)

    def require_there(self) -> None:
        """Raise `InviteError` if it hung up, or spoke out of turn, while the operator thought."""
        until_s = time.monotonic() + _LISTEN_S
        self.stream.set_deadline(until_s)
        try:
            self.stream.recv_into(memoryview(bytearray(1)))
        except LinkBroken:
            # The deadline passed without data, so the newcomer still waits, as it should.
            if time.monotonic() >= until_s:
                self.stream.set_deadline(time.monotonic() + _HAND_OVER_S)
                return
        self.stream.close()
        raise InviteError(
            f"{self.card.name} went away before it was let in, and the invitation is used up",
            hint="make a new one with `convoy invite`",
        )

    def accept(self, signed_roster: bytes) -> None:
        """Hand over the roster that lists it. Raises `LinkBroken` if it is gone."""
        mac = listener_mac(self._secret, self._spoken, signed_roster)
        try:
            send_enrolment(self.stream, EnrolmentType.ACCEPTED, mac + signed_roster)
        finally:
            self.stream.close()

    def refuse(self, reason: Refusal) -> None:
        """Tell it no, if it is still there."""
        _send_refusal(self.stream, reason)
        self.stream.close()


class Enrolment:
    """Run one invitation, open from construction to ``close``."""

    def __init__(
        self,
        sock: socket.socket,
        certificate: OneTimeCertificate,
        token: Token,
        *,
        consumption: Consumption,
        judge: Judge,
        limits: EnrolmentLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the invitation.

        ``judge`` returns the reason why a proved card cannot come in, or None. It runs under a lock, one
        at a time.
        """
        self._token = token
        self._terms = Terms(token.secret, token.invitation, token.fingerprint)
        self._consumption = consumption
        self._judge = judge
        self._limits = limits or EnrolmentLimits()
        self._lock = threading.Lock()
        # Challenges without a right proof so far, those that may still get one included.
        self._num_challenged = 0
        # Of these, the ones that ended.
        self._num_unproved = 0
        # Both clocks count: the monotonic one may stand still while a machine sleeps, and the other may be
        # set back.
        self._clock = clock
        self._until_s = clock() + max(0.0, token.expires - time.time())
        self._found: queue.SimpleQueue[Newcomer | ConvoyError] = queue.SimpleQueue()
        self._listener = EnrolmentListener(sock, certificate, self._meet, self._limits)

    def wait(self) -> Newcomer:
        """Return the newcomer that used the invitation up. Raises `InviteError` if none did in its time."""
        try:
            found = self._found.get(timeout=max(0.0, self._until_s - self._clock()))
        except queue.Empty:
            with self._lock:
                used = self._consumption.used
            if not used:
                self._token.require_usable(datetime.datetime.now(datetime.UTC))
                raise InviteError(
                    "the invitation expired before a machine used it",
                    hint="make a new one with `convoy invite`; --minutes gives more time",
                ) from None
            found = self._last_found()
        if isinstance(found, ConvoyError):
            raise found
        return found

    def _last_found(self) -> Newcomer | ConvoyError:
        # It was used in the last moment, and its thread is about to report the newcomer.
        try:
            return self._found.get(timeout=self._limits.proof_timeout_s)
        except queue.Empty:
            return InviteError(
                "the invitation is used up, but not through this process",
                hint="make a new one with `convoy invite`",
            )

    @property
    def num_half_open(self) -> int:
        return self._listener.num_half_open

    def close(self) -> None:
        self._listener.close()

    # On the thread of one connection.

    def _meet(self, stream: Stream, host: str) -> None:
        # A caller without the secret is hung up on. It gets no answer and leaves only a line in the log.
        commitment = check_hello(self._terms, _expect(stream, EnrolmentType.HELLO))
        if (over := self._begin_challenge()) is not None:
            self._turn_away(stream, over)
            return
        try:
            card, spoken = self._challenge(stream, commitment)
        except ConvoyError:
            self._count_unproved()
            raise
        with self._lock:
            self._num_challenged -= 1
        shown = code(self._terms.secret, spoken)
        newcomer = Newcomer(card, shown, host, stream, self._terms.secret, spoken)
        if (refusal := self._consume(newcomer)) is not None:
            self._turn_away(stream, refusal)
            return
        self._tell(newcomer, stream, spoken)

    def _begin_challenge(self) -> Refusal | None:
        """Count a challenge before it is sent, so that parallel connections get no more than serial ones."""
        with self._lock:
            if (over := self._over()) is None:
                self._num_challenged += 1
            return over

    def _challenge(self, stream: Stream, commitment: bytes) -> tuple[EnrolmentCard, bytes]:
        """Return the card of a right proof, and the transcript."""
        nonce = os.urandom(NONCE_BYTES)
        send_enrolment(stream, EnrolmentType.CHALLENGE, nonce)
        body = _expect(stream, EnrolmentType.PROOF)
        try:
            return self._check(commitment, nonce, body)
        except (HandshakeError, FrameError, IdentityError) as error:
            self._turn_away(stream, Refusal.FAILED)
            raise HandshakeError(error.message) from error

    def _check(self, commitment: bytes, nonce: bytes, body: bytes) -> tuple[EnrolmentCard, bytes]:
        proof, card_bytes = decode_proof(body)
        spoken = transcript(self._terms, commitment, nonce, proof.nonce, card_bytes)
        check_mac(self._terms.secret, spoken, proof)
        check_commitment(commitment, proof.nonce, card_bytes)
        card = decode_card(card_bytes)
        check_signatures(spoken, proof, card.identity_key, certificate_key(card.certificate_der))
        return card, spoken

    def _consume(self, newcomer: Newcomer) -> Refusal | None:
        """Use the invitation up, on disk, before the newcomer is told.

        A card that `judge` refuses uses nothing up.
        """
        with self._lock:
            if (over := self._used_or_late()) is not None:
                return over
            if (refusal := self._judge(newcomer.card)) is not None:
                return refusal
            who = f"{newcomer.card.name} from {newcomer.host}, identity {newcomer.card.identity_key.hex()}"
            try:
                self._consumption.consume(who)
            except InviteError:
                return Refusal.CONSUMED
            # The disk failed. The invitation must not count as used, and no machine may come in.
            except IdentityError as error:
                self._found.put(error)
                return Refusal.ENDED
        return None

    def _tell(self, newcomer: Newcomer, stream: Stream, spoken: bytes) -> None:
        try:
            mac = listener_mac(self._terms.secret, spoken, PENDING)
            send_enrolment(stream, EnrolmentType.PENDING, mac)
        except LinkBroken as error:
            gone = f"{newcomer.card.name} used the invitation up and went away"
            self._found.put(InviteError(gone, hint="make a new one with `convoy invite`"))
            raise LinkBroken(gone) from error
        stream.set_deadline(time.monotonic() + self._limits.decision_timeout_s)
        self._found.put(newcomer)

    def _over(self) -> Refusal | None:
        if (over := self._used_or_late()) is not None:
            return over
        return Refusal.BUSY if self._num_challenged >= self._limits.max_unproved_challenges else None

    def _used_or_late(self) -> Refusal | None:
        if self._consumption.used:
            return Refusal.CONSUMED
        late = self._clock() >= self._until_s or time.time() >= self._token.expires
        return Refusal.EXPIRED if late else None

    def _count_unproved(self) -> None:
        with self._lock:
            self._num_unproved += 1
            if self._num_unproved == self._limits.max_unproved_challenges:
                text = (
                    f"the invitation is closed: {self._num_unproved} connections with its token got a "
                    "challenge and sent no right proof"
                )
                hint = "the token may have leaked: make a new one, and send it over another channel"
                self._found.put(InviteError(text, hint=hint))

    @staticmethod
    def _turn_away(stream: Stream, reason: Refusal) -> None:
        _send_refusal(stream, reason)
        stream.close()


def _send_refusal(stream: Stream, reason: Refusal) -> None:
    try:
        send_enrolment(stream, EnrolmentType.REFUSED, bytes([reason]))
    except LinkBroken:
        # The newcomer left first, so it needs no answer.
        return


def _expect(stream: Stream, kind: EnrolmentType) -> bytes:
    came, body = receive_enrolment(stream)
    if came is not kind:
        raise FrameError(f"a {came.name} came, expected a {kind.name}")
    return body
